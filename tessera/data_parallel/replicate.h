#pragma once
#include "tessera/data_parallel/detail/options.h"
#include "tessera/data_parallel/detail/replica.h"
#include "tessera/nn/hooks.h"

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

struct ReplicateOptions : DDPOptions {
  std::vector<const torch::nn::Module*> ignored_modules = {};  // their parameters, and those below, stay as they are
};

namespace detail {
struct ReplicateState;
}

// What replicate() did to a module; copies share it.
class Replicated {
 public:
  // Instead of no_sync(): what the next forward passes' backward passes do.
  void set_requires_gradient_sync(bool sync);
  // hook(state, bucket). Kept until the first forward, where the reducer is made.
  template <class State, class Hook>
  void register_comm_hook(State state, Hook hook) {
    add_hook(make_comm_hook(std::move(state), std::move(hook)));
  }
  const data_parallel::Replica* replica() const;  // null before the first forward

 private:
  friend Replicated replicate(torch::nn::Module&, const ReplicateOptions&);
  friend Replicated replicated(const torch::nn::Module&);
  void add_hook(CommHook hook);
  std::shared_ptr<detail::ReplicateState> state_;
};

// Data parallelism in place: the module keeps its type and its names, and its calls average gradients over the ranks.
// Lazy: ranks are compared and parameters made equal in the first forward. The module must be able to have hooks (made
// by a holder of ours). It cannot be cloned afterwards.
// Example:  replicate(*model, {{.device_mesh = mesh["dp"]}});
Replicated replicate(torch::nn::Module& module, const ReplicateOptions& options = {});
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> Replicated
replicate(H& holder, const ReplicateOptions& options = {}) {
  return replicate(static_cast<torch::nn::Module&>(*holder), options);
}

// The same handle again. Throws UsageError if the module was not given to replicate().
Replicated replicated(const torch::nn::Module& module);

}  // namespace tessera
