#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>

// Kernels of inplace_ops.cpp and segment_ops.cpp. functional_collectives.cpp registers them together with its own:
// schemas use the class Group, which must be registered first, and the order of static initialisers is not defined.
namespace tessera::comm::detail {

// The handle of a registered op. Look it up once and keep it in a static variable.
template <class Signature>
auto find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor all_reduce_inplace(const at::Tensor& x, std::string_view op, const Group& group);
void all_reduce_coalesced_inplace(at::TensorList xs, std::string_view op, const Group& group);
at::Tensor broadcast_inplace(const at::Tensor& x, int64_t source, const Group& group);
at::Tensor all_gather_into(const at::Tensor& out, const at::Tensor& x, const Group& group);
at::Tensor reduce_scatter_into(const at::Tensor& out, const at::Tensor& x, std::string_view op, const Group& group);
void all_gather_into_segments_inplace(at::TensorList outs, const at::Tensor& part, at::IntArrayRef segments,
                                      std::string_view label, const Group& group);
at::Tensor reduce_scatter_segments_into(const at::Tensor& out, at::TensorList ins, at::IntArrayRef segments,
                                        std::string_view op, std::string_view label, const Group& group);

}  // namespace tessera::comm::detail
