#include "tessera/comm/detail/inplace_ops.h"

#include "tessera/comm/detail/inplace_kernels.h"

#include <ATen/core/dispatch/Dispatcher.h>

namespace tessera::comm {
namespace {

// The values come behind autograd's back; what was saved of the old ones must be found stale.
void written(const at::Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

template <class Signature>
auto op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace

at::Tensor detail::all_reduce_inplace(const at::Tensor& x, std::string_view op, const Group& group) {
  at::Tensor to = x;
  group->add_pending(x, group->all_reduce(to, parse_reduce_op(op)));
  written(x);
  return x;
}

void detail::all_reduce_coalesced_inplace(at::TensorList xs, std::string_view op, const Group& group) {
  std::vector<at::Tensor> to(xs.begin(), xs.end());
  const Work work = group->all_reduce_coalesced(to, parse_reduce_op(op));
  for (const auto& x : xs) {
    group->add_pending(x, work);
    written(x);
  }
}

at::Tensor detail::broadcast_inplace(const at::Tensor& x, int64_t source, const Group& group) {
  at::Tensor to = x;
  group->add_pending(x, group->broadcast(to, source));
  written(x);
  return x;
}

at::Tensor detail::all_gather_into(const at::Tensor& out, const at::Tensor& x, const Group& group) {
  at::Tensor to = out;
  group->add_pending(out, group->all_gather_into_tensor(to, x));
  written(out);
  return out;
}

at::Tensor detail::reduce_scatter_into(const at::Tensor& out, const at::Tensor& x, std::string_view op,
                                       const Group& group) {
  at::Tensor to = out;
  group->add_pending(out, group->reduce_scatter_tensor(to, x, parse_reduce_op(op)));
  written(out);
  return out;
}

void all_reduce_(const at::Tensor& x, ReduceOp reduce_op, const Group& group) {
  static auto handle = op<decltype(detail::all_reduce_inplace)>("tessera::all_reduce_");
  handle.call(x, to_string(reduce_op), group);
}
void all_reduce_coalesced_(at::TensorList xs, ReduceOp reduce_op, const Group& group) {
  static auto handle = op<decltype(detail::all_reduce_coalesced_inplace)>("tessera::all_reduce_coalesced_");
  handle.call(xs, to_string(reduce_op), group);
}
void broadcast_(const at::Tensor& x, int64_t source, const Group& group) {
  static auto handle = op<decltype(detail::broadcast_inplace)>("tessera::broadcast_");
  handle.call(x, source, group);
}
void all_gather_into_(const at::Tensor& out, const at::Tensor& x, const Group& group) {
  static auto handle = op<decltype(detail::all_gather_into)>("tessera::all_gather_into_");
  handle.call(out, x, group);
}
void reduce_scatter_into_(const at::Tensor& out, const at::Tensor& x, ReduceOp reduce_op, const Group& group) {
  static auto handle = op<decltype(detail::reduce_scatter_into)>("tessera::reduce_scatter_into_");
  handle.call(out, x, to_string(reduce_op), group);
}

}  // namespace tessera::comm
