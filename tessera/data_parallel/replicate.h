#pragma once
#include "tessera/data_parallel/detail/options.h"
#include "tessera/data_parallel/detail/replica.h"
#include "tessera/nn/hooks.h"

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

// Options of replicate.
struct ReplicateOptions : DDPOptions {
  std::vector<const torch::nn::Module*> ignored_modules = {};  // their parameters, and those below, are not averaged
};

namespace detail {
struct ReplicateState;
}

// The data parallel state of a module that was given to replicate(). Copies share it.
// Example:  replicated(model).set_requires_gradient_sync(false);
class Replicated {
 public:
  // Whether backward passes of the following forward passes average gradients. Used instead of no_sync().
  void set_requires_gradient_sync(bool sync);
  // Replaces the all-reduce by hook(state, bucket); see data_parallel/comm_hook.h. The reducer gets it in the first
  // forward.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook) {
    add_hook(make_comm_hook(std::move(state), std::move(hook)));
  }
  // The reducer and the group, for inspection; null before the first forward.
  const data_parallel::Replica* replica() const;

 private:
  friend Replicated replicated(const torch::nn::Module&);
  void add_hook(CommHook hook);
  std::shared_ptr<detail::ReplicateState> state_;
};

// Data parallelism in place: the module keeps its type and its names, and backward averages gradients over the ranks.
// The first forward checks that ranks have the same parameters and broadcasts their values. The module must be able to
// have hooks (a Tessera holder makes it so). It cannot be cloned afterwards. Returns its argument.
// For a pipeline stage, pipelining::average_gradients() communicates once per step; zero-bubble schedules need it.
// Example:  replicate(model, {{.device_mesh = mesh["dp"]}});
torch::nn::Module& replicate(torch::nn::Module& module, const ReplicateOptions& options = {});
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& replicate(H& holder,
                                                                                 const ReplicateOptions& options = {}) {
  replicate(static_cast<torch::nn::Module&>(*holder), options);
  return holder;
}

// The state of a module that was given to replicate(). Throws UsageError for other modules. The second overload takes a
// holder.
Replicated replicated(const torch::nn::Module& module);
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> Replicated replicated(const H& holder) {
  return replicated(static_cast<const torch::nn::Module&>(*holder));
}

}  // namespace tessera
