#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"

#include <ATen/core/ivalue.h>

#include <functional>
#include <string>
#include <type_traits>
#include <utility>

// How a bucket of gradients is reduced, if not by a plain mean. A hook starts its communication and returns what will
// be the reduced values; backward goes on meanwhile. It divides by the number of ranks itself: nobody else does.
//
//   ddp->register_comm_hook(nullptr, bf16_compress_hook);                       // nullptr: DDP's own group
//   ddp->register_comm_hook(my_state, [](MyState& state, GradBucket& bucket) {
//     auto x = bucket.buffer().div_(bucket.group()->size());
//     comm::all_reduce_(x, ReduceOp::Sum, bucket.group());                      // posted, not waited for
//     return x;
//   });
namespace tessera {

// Gradients that travel together, as a hook sees them. Those of distributed parameters are this rank's pieces.
class GradBucket {
 public:
  GradBucket(size_t index, bool last, at::Tensor buffer, Tensors gradients, Tensors parameters, comm::Group group)
      : index_(index),
        last_(last),
        buffer_(std::move(buffer)),
        gradients_(std::move(gradients)),
        parameters_(std::move(parameters)),
        group_(std::move(group)) {}

  size_t index() const { return index_; }
  bool is_last() const { return last_; }                     // of this backward
  at::Tensor& buffer() { return buffer_; }                   // flat; not divided
  const Tensors& gradients() const { return gradients_; }    // views of it, in the parameters' shapes
  const Tensors& parameters() const { return parameters_; }  // in the order of the gradients
  const comm::Group& group() const { return group_; }

 private:
  size_t index_;
  bool last_;
  at::Tensor buffer_;
  Tensors gradients_, parameters_;
  comm::Group group_;
};

// What a hook returns: the reduced values (of the buffer's size, any dtype), which may still be under way.
class BucketResult {
 public:
  // Waited for, if it is pending on the bucket's group.
  BucketResult(at::Tensor reduced) : reduced_(std::move(reduced)) {}  // NOLINT(google-explicit-constructor)
  // Called at the end of backward: the place for what comes after the collective.
  template <std::invocable F>
  requires std::is_convertible_v<std::invoke_result_t<F>, at::Tensor> BucketResult(F finish)
      : finish_(std::move(finish)) {}  // NOLINT(google-explicit-constructor)
  // A future of c10d: its value is a tensor, or a list of one.
  BucketResult(c10::intrusive_ptr<c10::ivalue::Future> future);  // NOLINT(google-explicit-constructor)
  BucketResult() = default;

  at::Tensor take(const comm::Group& group);

 private:
  at::Tensor reduced_;
  std::function<at::Tensor()> finish_;
};

using CommHook = std::function<BucketResult(GradBucket&)>;

// What register_comm_hook(state, hook) registers.
template <class State, class Hook>
CommHook make_comm_hook(State state, Hook hook) {
  return [state = std::move(state), hook = std::move(hook)](GradBucket& bucket) mutable -> BucketResult {
    return hook(state, bucket);
  };
}

// PyTorch's. The state is the group to reduce over; null: the bucket's own.
BucketResult allreduce_hook(const comm::Group& group, GradBucket& bucket);
// Cast down, divided, summed in low precision, cast up again by whoever reads the result.
BucketResult fp16_compress_hook(const comm::Group& group, GradBucket& bucket);
BucketResult bf16_compress_hook(const comm::Group& group, GradBucket& bucket);

// The optimizer in backward: as soon as a bucket is reduced and its gradients are in place, `step` is called for each
// of its parameters, and the gradient is let go of. One optimizer a parameter serves well.
// Example:  ddp->step_in_backward([&](const at::Tensor& p) { optimizers.at(p.unsafeGetTensorImpl()).step(); });
using ParameterStep = std::function<void(const at::Tensor& parameter)>;

}  // namespace tessera
