#include "tessera/data_parallel/comm_hook.h"

#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"

namespace tessera {
namespace {

const comm::Group& hook_group(const comm::Group& state, const GradBucket& bucket) {
  return state ? state : bucket.group();
}

// Starts the mean of x over the ranks, in place.
BucketResult start_mean(at::Tensor x, const comm::Group& group) {
  comm::all_reduce_(x.div_(group->size()), ReduceOp::Sum, group);
  return [x, group] {
    funcol::wait(x, group);
    return x;
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
  funcol::wait(reduced_, group);
  return std::move(reduced_);
}

BucketResult allreduce_hook(const comm::Group& state, GradBucket& bucket) {
  return start_mean(bucket.buffer(), hook_group(state, bucket));
}
BucketResult fp16_compress_hook(const comm::Group& state, GradBucket& bucket) {
  return start_mean(bucket.buffer().to(c10::kHalf), hook_group(state, bucket));
}
BucketResult bf16_compress_hook(const comm::Group& state, GradBucket& bucket) {
  return start_mean(bucket.buffer().to(c10::kBFloat16), hook_group(state, bucket));
}

}  // namespace tessera
