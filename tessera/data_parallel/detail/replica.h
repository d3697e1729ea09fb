#pragma once
#include "tessera/data_parallel/comm_hook.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/data_parallel/detail/options.h"
#include "tessera/data_parallel/detail/per_parameter_reducer.h"
#include "tessera/data_parallel/detail/reducer.h"
#include "tessera/data_parallel/detail/reducer_mode.h"
#include "tessera/data_parallel/detail/requires_grad_agreement.h"

#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace tessera::data_parallel {

// Keeps one module equal on all ranks of a group. DistributedDataParallel and replicate share it. Parameters may be
// frozen, all of them too (the discriminator of a GAN while its generator trains).
class Replica {
 public:
  // Checks over the store that all ranks have the same parameters, then broadcasts the first rank's values (init_sync).
  // `what` begins error messages. If it throws, nothing was changed.
  // Parameters at and below `ignored` modules are left alone.
  Replica(std::string what, const torch::nn::Module& module, const DDPOptions& options,
          const std::vector<const torch::nn::Module*>& ignored = {}, ReducerMode mode = ReducerModeScope::current());

  void before_forward();
  void after_forward(const Tensors& outputs);

  void register_comm_hook(CommHook hook);
  void step_in_backward(ParameterStep step);
  void set_requires_gradient_sync(bool sync);
  bool requires_gradient_sync() const { return sync_; }

  // Runs `body` on ranks with different numbers of batches; see DistributedDataParallelImpl::join.
  void join(const std::function<void()>& body, const JoinOptions& options);

  const comm::Group& group() const { return group_; }
  const Reducer* reducer() const { return reducer_.get(); }  // null in the per-parameter modes

 private:
  void make_reducer();
  void shadow_forward();
  void check_agreement() const;

  std::string what_;
  NamedTensors parameters_;
  Tensors sparse_;  // parameters with sparse gradients
  Tensors buffers_;
  comm::Group group_;
  DDPOptions options_;
  ReducerMode mode_;
  RequiresGradAgreement frozen_;
  CommHook hook_;
  ParameterStep step_;
  bool sync_ = true;
  bool forward_is_compiled_ = false;  // a replayed step does not call before_forward()
  bool buffers_stale_ = false;
  std::shared_ptr<Reducer> reducer_;
  std::shared_ptr<PerParameterReducer> per_parameter_;
  std::unique_ptr<Join> join_;  // while join() runs
};

// While alive, forward and backward passes accumulate gradients on this rank without communication. It can be moved,
// for example into a std::optional or a list of guards.
class NoSync {
 public:
  explicit NoSync(std::shared_ptr<Replica> replica)
      : replica_(std::move(replica)), before_(replica_->requires_gradient_sync()) {
    replica_->set_requires_gradient_sync(false);
  }
  ~NoSync() { release(); }
  NoSync(NoSync&& other) noexcept = default;
  NoSync& operator=(NoSync&& other) noexcept {
    if (this == &other) return *this;
    release();
    replica_ = std::move(other.replica_);
    before_ = other.before_;
    return *this;
  }

 private:
  void release() {
    if (const auto replica = std::exchange(replica_, nullptr)) replica->set_requires_gradient_sync(before_);
  }

  std::shared_ptr<Replica> replica_;  // the guard may outlive the module; null after a move
  bool before_;
};

}  // namespace tessera::data_parallel
