#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/work.h"

#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// DDP communication hooks: replace the all-reduce of a bucket of gradients. A hook starts its communication and returns
// the tensor that will have the reduced values; backward continues meanwhile. The hook itself divides by the number of
// ranks.
//
//   ddp->register_comm_hook(nullptr, bf16_compress_hook);                       // nullptr: DDP's own group
//   ddp->register_comm_hook(my_state, [](MyState& state, GradBucket& bucket) {
//     auto x = bucket.buffer().div_(bucket.group()->size());
//     return funcol::all_reduce(x, ReduceOp::Sum, bucket.group());              // starts it; DDP waits for it
//   });
namespace tessera {

// The gradients that one collective reduces (PyTorch: GradBucket). Of a DTensor gradient, the local tensor.
class GradBucket {
 public:
  // Made by DDP.
  GradBucket(size_t index, bool last, at::Tensor buffer, Tensors gradients, Tensors parameters, comm::Group group)
      : index_(index),
        last_(last),
        buffer_(std::move(buffer)),
        gradients_(std::move(gradients)),
        parameters_(std::move(parameters)),
        group_(std::move(group)) {}

  size_t index() const { return index_; }                    // position in the order of reduction
  bool is_last() const { return last_; }                     // the last bucket of this backward
  at::Tensor& buffer() { return buffer_; }                   // 1-D; not divided by the number of ranks
  const Tensors& gradients() const { return gradients_; }    // views of the buffer in the parameters' shapes
  const Tensors& parameters() const { return parameters_; }  // in the order of the gradients
  const comm::Group& group() const { return group_; }        // DDP's group

 private:
  size_t index_;
  bool last_;
  at::Tensor buffer_;
  Tensors gradients_, parameters_;
  comm::Group group_;
};

// What a hook returns: the reduced values, in any dtype and with the buffer's number of elements. The collective may
// still be in flight.
class BucketResult {
 public:
  // DDP waits for it if a collective on the bucket's group writes it.
  BucketResult(at::Tensor reduced) : reduced_(std::move(reduced)) {}  // NOLINT(google-explicit-constructor)
  // A function that is called at the end of backward. It waits for the collective and finishes the computation.
  template <std::invocable F>
  requires std::is_convertible_v<std::invoke_result_t<F>, at::Tensor> BucketResult(F finish)
      : finish_(std::move(finish)) {}  // NOLINT(google-explicit-constructor)
  // A c10d future of a tensor, or of a list with one tensor.
  BucketResult(c10::intrusive_ptr<c10::ivalue::Future> future);  // NOLINT(google-explicit-constructor)
  // An empty result.
  BucketResult() = default;

  // Waits and returns the reduced values.
  at::Tensor take(const comm::Group& group);

 private:
  at::Tensor reduced_;
  std::function<at::Tensor()> finish_;
};

// A registered hook.
using CommHook = std::function<BucketResult(GradBucket&)>;

// Binds `state` to `hook`, as register_comm_hook(state, hook) does.
template <class State, class Hook>
CommHook make_comm_hook(State state, Hook hook) {
  return [state = std::move(state), hook = std::move(hook)](GradBucket& bucket) mutable -> BucketResult {
    return hook(state, bucket);
  };
}

// PyTorch's built-in hooks. The state is the group to reduce over; null: the bucket's group. The compress hooks cast
// gradients to float16 or bfloat16, divide and sum them in that dtype, and DDP casts the result back.
BucketResult allreduce_hook(const comm::Group& group, GradBucket& bucket);
BucketResult fp16_compress_hook(const comm::Group& group, GradBucket& bucket);
BucketResult bf16_compress_hook(const comm::Group& group, GradBucket& bucket);

// The state of powerSGD_hook, with the names and defaults of PyTorch's PowerSGDState.
struct PowerSGDState {
  comm::Group process_group = {};         // none: the bucket's group
  int64_t matrix_approximation_rank = 1;  // columns of the factors P and Q
  int64_t start_powerSGD_iter = 1000;     // iterations with a plain all-reduce before
  double min_compression_rate = 2;        // a smaller gain is not worth it: such tensors are all-reduced as they are
  bool use_error_feedback = true;         // adds what was lost to the next gradient
  bool warm_start = true;                 // starts from the last Q; false: from a new random Q in each iteration
  uint64_t random_seed = 0;               // of Q, equal on all ranks

  // The memory of a bucket between iterations. Used by the hook.
  struct Memory {
    at::Tensor error, q;  // the lost part of the last gradients; the factors Q, one after the other
  };
  int64_t iter = 0;                   // iterations so far
  std::vector<Memory> memory = {};    // by bucket
  std::shared_ptr<void> random = {};  // the generator of seeds
};

// PowerSGD (Vogels et al. 2019): sends factors of low rank instead of gradients. Each gradient is a matrix M (its first
// dim, and the others together). All ranks have the same Q:
//
//   P = mean of M Q       orthogonalize P       Q = mean of M^T P       the gradient becomes P Q^T
//
// The values are those of PyTorch's powerSGD_hook.
// Example:  ddp->register_comm_hook(std::make_shared<PowerSGDState>(), powerSGD_hook);
BucketResult powerSGD_hook(const std::shared_ptr<PowerSGDState>& state, GradBucket& bucket);  // NOLINT: PyTorch's name

// ---- hooks of FSDP

// Replaces the all-gather of fully_shard: FSDPModule::set_custom_all_gather (PyTorch: AllGather).
class AllGather {
 public:
  virtual ~AllGather() = default;
  // The memory for `output`.
  virtual at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);
  // Starts to write the inputs of all ranks, one after the other, to `output`. An empty Work: it is done.
  virtual comm::Work operator()(at::Tensor& output, const at::Tensor& input, const comm::Group& group,
                                bool async_op) = 0;
};

// Replaces the reduce-scatter of fully_shard: FSDPModule::set_custom_reduce_scatter (PyTorch: ReduceScatter).
class ReduceScatter {
 public:
  virtual ~ReduceScatter() = default;
  // The memory for `input`.
  virtual at::Tensor allocate(at::IntArrayRef sizes, const at::TensorOptions& options);
  // Starts to write the reduction of this rank's part of all inputs to `output`. An empty Work: it is done.
  virtual comm::Work operator()(at::Tensor& output, const at::Tensor& input, const comm::Group& group, ReduceOp op,
                                bool async_op) = 0;
};

// Hooks for FullyShardedDataParallel::register_comm_hook (PyTorch: algorithms._comm_hooks). `grad`: the unsharded
// gradients of a wrapped module in one 1-D tensor; `output` gets this rank's shard of the mean.
// Example:  fsdp->register_comm_hook(comm_hooks::DefaultState(group), comm_hooks::bf16_compress_hook);
namespace comm_hooks {

// The group to reduce over. As in PyTorch, gradients are divided before and after the sum.
struct DefaultState {
  // Sets the factors for the size of the group.
  explicit DefaultState(comm::Group group);
  comm::Group process_group;                                                 // to reduce over
  double gradient_predivide_factor = 1.0, gradient_postdivide_factor = 1.0;  // their product is the number of ranks
};
// The mean, in place; for ShardingStrategy::NO_SHARD.
void allreduce_hook(DefaultState& state, at::Tensor& grad);
// The mean, as without a hook; for sharded strategies. The others communicate in another dtype.
void reduce_scatter_hook(DefaultState& state, at::Tensor& grad, at::Tensor& output);
void fp16_compress_hook(DefaultState& state, at::Tensor& grad, at::Tensor& output);
void bf16_compress_hook(DefaultState& state, at::Tensor& grad, at::Tensor& output);

}  // namespace comm_hooks

// Optimizer step in backward: when the gradients of a bucket are reduced, DDP calls it for each parameter of the bucket
// and then frees the gradient. Use one optimizer per parameter.
// Example:  ddp->step_in_backward([&](const at::Tensor& p) { optimizers.at(p.unsafeGetTensorImpl()).step(); });
using ParameterStep = std::function<void(const at::Tensor& parameter)>;

}  // namespace tessera
