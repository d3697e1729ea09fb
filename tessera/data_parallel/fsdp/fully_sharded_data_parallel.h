#pragma once
#include "tessera/data_parallel/detail/wrapper_module.h"
#include "tessera/data_parallel/fsdp/detail/api/clip_grad.h"
#include "tessera/data_parallel/fsdp/detail/api/options.h"
#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"
#include "tessera/data_parallel/fsdp/summon_full_params.h"
#include "tessera/nn/holder.h"

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

namespace detail {

// Shards a module in place, with hooks. If it throws UsageError, nothing was changed.
void shard_flat(torch::nn::Module& module, const FSDPOptions& options);
// Registers a comm hook on all sharded modules at and below `module`; one of the two is set.
void register_fsdp_comm_hook(torch::nn::Module& module, std::function<void(at::Tensor&, at::Tensor&)> reduce_scatter,
                             std::function<void(at::Tensor&)> all_reduce);
// This rank's flat parameters of the sharded modules at and below `module`.
Tensors flat_params_of(const torch::nn::Module& module);

}  // namespace detail

// While alive, backward accumulates unsharded gradients on this rank without communication. Its destructor restores the
// setting of each module. Made by FullyShardedDataParallel::no_sync().
class FSDPNoSync {
 public:
  // For the sharded modules at and below `module`.
  explicit FSDPNoSync(const torch::nn::Module& module);
  ~FSDPNoSync();
  FSDPNoSync(const FSDPNoSync&) = delete;

 private:
  std::vector<std::pair<std::shared_ptr<data_parallel::fsdp::ScheduledGroup>, bool>> before_;
};

// Shards the parameters of a module over ranks as one flat parameter. Each rank keeps a shard of it. The parameters are
// all-gathered while the module computes. Called like the module itself.
//
//   FullyShardedDataParallel fsdp(model, {.device_mesh = mesh["dp"]});
//   optim::AdamW opt(fsdp->parameters());      // one flat parameter; with use_orig_params the original parameters
//   fsdp(x).sum().backward();
//   fsdp->clip_grad_norm_(1.0);
//
// Hooks are put on `model` in place, so `model` may also be called, and inner modules may be wrapped before or by
// auto_wrap_policy. A parameter that is a DTensor over another axis (tensor parallelism) is one again when unsharded.
//
// H: a holder (TESSERA_MODULE).
template <class H>
class FullyShardedDataParallelImpl : public torch::nn::Module, public data_parallel::WrapperModule {
 public:
  // Shards `wrapped`. If it throws UsageError, nothing was changed.
  explicit FullyShardedDataParallelImpl(H wrapped, const FSDPOptions& options = {})
      : torch::nn::Module("FullyShardedDataParallel"), module(std::move(wrapped)) {
    detail::shard_flat(*module, options);
    register_module("module", module);
  }

  // Calls the wrapped module.
  template <class... Args>
  auto forward(Args&&... args) {
    return module(std::forward<Args>(args)...);
  }

  // This rank's shard of the parameters, one 1-D tensor per wrapped module, outer modules first. Their .grad has the
  // reduced gradients.
  Tensors flat_params() const { return detail::flat_params_of(*module); }

  // Scales all gradients in place so that their norm over all ranks is at most max_norm. Returns the norm before.
  // norm_type: above 0, or infinity. One all-reduce for each set of groups over which parameters are sharded.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2) const {
    return data_parallel::fsdp::clip_grad_norm_(*module, max_norm, norm_type);
  }

  // Unshards the parameters while the returned object is alive.
  [[nodiscard]] SummonFullParams summon_full_params(SummonOptions options = {}) {
    return SummonFullParams(*module, options);
  }

  // Replaces the reduction of gradients by hook(state, grad, output), or with ShardingStrategy::NO_SHARD by
  // hook(state, grad), in place. `grad`: the unsharded gradients of a wrapped module in one 1-D tensor; `output` gets
  // this rank's shard. The hook divides by the number of ranks. Register it once, before the first forward. Throws
  // UsageError for hybrid strategies. data_parallel/comm_hook.h has PyTorch's hooks.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook) {
    auto shared = std::make_shared<std::pair<State, Hook>>(std::move(state), std::move(hook));  // for all modules
    if constexpr (std::is_invocable_v<Hook&, State&, at::Tensor&, at::Tensor&>)
      detail::register_fsdp_comm_hook(
          *module, [shared](at::Tensor& grad, at::Tensor& output) { shared->second(shared->first, grad, output); }, {});
    else
      detail::register_fsdp_comm_hook(*module, {}, [shared](at::Tensor& grad) { shared->second(shared->first, grad); });
  }

  // auto guard = fsdp->no_sync();    gradients are accumulated unsharded on this rank while it is alive
  [[nodiscard]] FSDPNoSync no_sync() const { return FSDPNoSync(*module); }

  // The wrapped module.
  H module;
};

// The holder of FullyShardedDataParallelImpl.
template <class H>
class FullyShardedDataParallel : public Holder<FullyShardedDataParallelImpl<H>> {
 public:
  // Shards `module`. If it throws UsageError, nothing was changed. The second constructor makes an empty holder.
  explicit FullyShardedDataParallel(H module, const FSDPOptions& options = {})
      : Holder<FullyShardedDataParallelImpl<H>>(
            std::make_shared<Hooked<FullyShardedDataParallelImpl<H>>>(std::move(module), options)) {}
  explicit FullyShardedDataParallel(std::nullptr_t) : Holder<FullyShardedDataParallelImpl<H>>(nullptr) {}
};

}  // namespace tessera
