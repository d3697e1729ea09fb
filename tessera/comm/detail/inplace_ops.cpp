#include "tessera/comm/detail/inplace_ops.h"

#include "tessera/comm/detail/inplace_kernels.h"

namespace tessera::comm {
namespace {

// Autograd does not see the write, so bump the version: a backward that saved the old value then throws.
void mark_modified(const at::Tensor& x) {
  if (!x.is_inference()) x.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

at::Tensor detail::all_reduce_inplace(const at::Tensor& x, std::string_view op, const Group& group) {
  at::Tensor to = x;
  group->add_pending(x, group->all_reduce(to, parse_reduce_op(op)));
  mark_modified(x);
  return x;
}

void detail::all_reduce_coalesced_inplace(at::TensorList xs, std::string_view op, const Group& group) {
  std::vector<at::Tensor> to(xs.begin(), xs.end());
  const Work work = group->all_reduce_coalesced(to, parse_reduce_op(op));
  for (const auto& x : xs) {
    group->add_pending(x, work);
    mark_modified(x);
  }
}

at::Tensor detail::broadcast_inplace(const at::Tensor& x, int64_t source, const Group& group) {
  at::Tensor to = x;
  group->add_pending(x, group->broadcast(to, source));
  mark_modified(x);
  return x;
}

at::Tensor detail::all_gather_into(const at::Tensor& out, const at::Tensor& x, const Group& group) {
  at::Tensor to = out;
  group->add_pending(out, group->all_gather_into_tensor(to, x));
  mark_modified(out);
  return out;
}

at::Tensor detail::reduce_scatter_into(const at::Tensor& out, const at::Tensor& x, std::string_view op,
                                       const Group& group) {
  at::Tensor to = out;
  group->add_pending(out, group->reduce_scatter_tensor(to, x, parse_reduce_op(op)));
  mark_modified(out);
  return out;
}

void all_reduce_(const at::Tensor& x, ReduceOp reduce_op, const Group& group) {
  static auto handle = detail::find_op<decltype(detail::all_reduce_inplace)>("tessera::all_reduce_");
  handle.call(x, to_string(reduce_op), group);
}
void all_reduce_coalesced_(at::TensorList xs, ReduceOp reduce_op, const Group& group) {
  static auto handle =
      detail::find_op<decltype(detail::all_reduce_coalesced_inplace)>("tessera::all_reduce_coalesced_");
  handle.call(xs, to_string(reduce_op), group);
}
void broadcast_(const at::Tensor& x, int64_t source, const Group& group) {
  static auto handle = detail::find_op<decltype(detail::broadcast_inplace)>("tessera::broadcast_");
  handle.call(x, source, group);
}
void all_gather_into_(const at::Tensor& out, const at::Tensor& x, const Group& group) {
  static auto handle = detail::find_op<decltype(detail::all_gather_into)>("tessera::all_gather_into_");
  handle.call(out, x, group);
}
void reduce_scatter_into_(const at::Tensor& out, const at::Tensor& x, ReduceOp reduce_op, const Group& group) {
  static auto handle = detail::find_op<decltype(detail::reduce_scatter_into)>("tessera::reduce_scatter_into_");
  handle.call(out, x, to_string(reduce_op), group);
}

}  // namespace tessera::comm
