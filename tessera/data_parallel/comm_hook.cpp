#include "tessera/data_parallel/comm_hook.h"

#include "tessera/comm/inplace_ops.h"
#include "tessera/comm/ops.h"

namespace tessera {
namespace {

const comm::Group& group_of(const comm::Group& state, const GradBucket& bucket) {
  return state ? state : bucket.group();
}

BucketResult compressed(c10::ScalarType dtype, const comm::Group& state, GradBucket& bucket) {
  const auto& group = group_of(state, bucket);
  auto small = bucket.buffer().to(dtype).div_(group->size());
  comm::all_reduce_(small, ReduceOp::Sum, group);
  return [small, group] {
    comm::wait(small, group);
    return small;
  };
}

}  // namespace

BucketResult::BucketResult(c10::intrusive_ptr<c10::ivalue::Future> future)
    : finish_([future = std::move(future)] {
        future->waitAndThrow();
        const auto value = future->value();
        return value.isTensorList() ? value.toTensorList().get(0) : value.toTensor();
      }) {}

at::Tensor BucketResult::take(const comm::Group& group) {
  if (finish_) return std::exchange(finish_, nullptr)();
  comm::wait(reduced_, group);
  return std::move(reduced_);
}

BucketResult allreduce_hook(const comm::Group& state, GradBucket& bucket) {
  const auto& group = group_of(state, bucket);
  auto& buffer = bucket.buffer().div_(group->size());
  comm::all_reduce_(buffer, ReduceOp::Sum, group);
  return [buffer, group] {
    comm::wait(buffer, group);
    return buffer;
  };
}

BucketResult fp16_compress_hook(const comm::Group& state, GradBucket& bucket) {
  return compressed(c10::kHalf, state, bucket);
}
BucketResult bf16_compress_hook(const comm::Group& state, GradBucket& bucket) {
  return compressed(c10::kBFloat16, state, bucket);
}

}  // namespace tessera
