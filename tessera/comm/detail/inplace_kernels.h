#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <string_view>

// Kernels of inplace_ops.cpp and runs_ops.cpp. ops.cpp registers them with its own: the class Group, which schemas
// name, must be there first, and files are initialised in no particular order.
namespace tessera::comm::detail {

at::Tensor all_reduce_inplace(const at::Tensor& x, std::string_view op, const Group& group);
void all_reduce_coalesced_inplace(at::TensorList xs, std::string_view op, const Group& group);
at::Tensor broadcast_inplace(const at::Tensor& x, int64_t source, const Group& group);
at::Tensor all_gather_into(const at::Tensor& out, const at::Tensor& x, const Group& group);
at::Tensor reduce_scatter_into(const at::Tensor& out, const at::Tensor& x, std::string_view op, const Group& group);
void all_gather_into_runs_inplace(at::TensorList outs, const at::Tensor& part, at::IntArrayRef runs,
                                  std::string_view label, const Group& group);
at::Tensor reduce_scatter_runs_into(const at::Tensor& out, at::TensorList ins, at::IntArrayRef runs,
                                    std::string_view op, std::string_view label, const Group& group);

}  // namespace tessera::comm::detail
