#pragma once
#include "tessera/data_parallel/fsdp/detail/api/options.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/summon_full_params.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <utility>
#include <vector>

namespace tessera {

// What wrapping does, without the type of the module.
class FSDPState {
 public:
  // Where it throws UsageError, nothing was changed.
  FSDPState(torch::nn::Module& module, const FSDPOptions& options);

  // The unit's parameters as one 1-D tensor a unit, this rank's part; .grad likewise. Outer units first.
  Tensors flat_params() const;

  // Scales all gradients in place so that their norm, over all ranks, is at most max_norm; gives the norm as it was.
  // One all-reduce for each set of ranks over which some are cut: usually one. norm_type: above 0, or infinity.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2) const;

  // While alive, gradients are accumulated whole, on this rank. Afterwards each unit does again what it did before.
  class NoSync {
   public:
    explicit NoSync(const FSDPState& state);
    ~NoSync();
    NoSync(const NoSync&) = delete;

   private:
    std::vector<std::pair<std::shared_ptr<data_parallel::fsdp::Turn>, bool>> before_;
  };

 private:
  torch::nn::Module* module_;
};

// Cuts the parameters of a module over ranks, as one flat parameter: each rank keeps a run of it, and they are gathered
// while the module computes. Hooks are attached in place: names stay as they are, typed members stay valid.
//
//   FullyShardedDataParallel fsdp(model, {.device_mesh = mesh["dp"]});
//   optim::AdamW opt(fsdp->parameters());      // one flat parameter; use_orig_params: the originals, each a run of it
//   fsdp(x).sum().backward();
//
// Modules inside may be wrapped before, or by auto_wrap_policy: each is a unit, gathered when its turn comes.
// A parameter that lies over another axis (tensor parallelism) lies so whenever it is whole.
template <class H>
class FullyShardedDataParallel {
 public:
  explicit FullyShardedDataParallel(H module, const FSDPOptions& options = {})
      : module_(std::move(module)), state_(*module_, options) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    return module_(std::forward<Args>(args)...);
  }
  H& module() { return module_; }
  auto* operator->() { return module_.get(); }
  auto& operator*() { return *module_; }
  Tensors flat_params() const { return state_.flat_params(); }
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2) {
    return state_.clip_grad_norm_(max_norm, norm_type);
  }

  [[nodiscard]] SummonFullParams summon_full_params(SummonOptions options = {}) {
    return SummonFullParams(*module_, options);
  }

  // auto guard = fsdp.no_sync();    gradients are accumulated whole, on this rank
  using NoSync = FSDPState::NoSync;
  [[nodiscard]] NoSync no_sync() { return NoSync(state_); }

 private:
  H module_;
  FSDPState state_;
};

}  // namespace tessera
