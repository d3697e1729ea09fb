#include "tessera/data_parallel/comm_hook.h"

#include <ATen/ops/empty.h>

namespace tessera {

at::Tensor AllGather::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}
at::Tensor ReduceScatter::allocate(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::empty(sizes, options);
}

namespace comm_hooks {
namespace {

void reduce_scatter_as(c10::ScalarType dtype, const DefaultState& state, const at::Tensor& grad, at::Tensor& output) {
  const auto input = grad.to(dtype).div_(state.gradient_predivide_factor);
  auto reduced = output.scalar_type() == dtype ? output : at::empty(output.sizes(), output.options().dtype(dtype));
  state.process_group->reduce_scatter_tensor(reduced, input, ReduceOp::Sum).wait();
  reduced.div_(state.gradient_postdivide_factor);
  if (!reduced.is_same(output)) output.copy_(reduced);
}

}  // namespace

// The factor before the sum is a power of two near the root of the number of ranks.
DefaultState::DefaultState(comm::Group group) : process_group(std::move(group)) {
  const auto ranks = process_group->size();
  int64_t factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) factor *= 2;
  gradient_predivide_factor = static_cast<double>(factor);
  gradient_postdivide_factor = static_cast<double>(ranks) / gradient_predivide_factor;
}

void allreduce_hook(DefaultState& state, at::Tensor& grad) {
  grad.div_(state.gradient_predivide_factor);
  state.process_group->all_reduce(grad, ReduceOp::Sum).wait();
  grad.div_(state.gradient_postdivide_factor);
}
void reduce_scatter_hook(DefaultState& state, at::Tensor& grad, at::Tensor& output) {
  reduce_scatter_as(grad.scalar_type(), state, grad, output);
}
void fp16_compress_hook(DefaultState& state, at::Tensor& grad, at::Tensor& output) {
  reduce_scatter_as(c10::kHalf, state, grad, output);
}
void bf16_compress_hook(DefaultState& state, at::Tensor& grad, at::Tensor& output) {
  reduce_scatter_as(c10::kBFloat16, state, grad, output);
}

}  // namespace comm_hooks
}  // namespace tessera
