#include "tessera/data_parallel/replicate.h"

#include "tessera/base/error.h"
#include "tessera/tracing/op_mode.h"
#include "tessera/nn/module_tree.h"

#include <map>
#include <mutex>
#include <optional>

namespace tessera {
namespace detail {

struct ReplicateState {
  const Module* module;
  ReplicateOptions options;
  ReducerMode mode;
  bool sync = true;
  std::vector<CommHook> queued;
  std::optional<data_parallel::Replica> replica;

  ~ReplicateState();
};

}  // namespace detail

namespace {

using detail::ReplicateState;

// Which modules were given to replicate(). A state leaves it when the module's hooks die, with the module.
std::mutex states_mutex;
std::map<const Module*, std::weak_ptr<ReplicateState>>& states() {
  static std::map<const Module*, std::weak_ptr<ReplicateState>> it;
  return it;
}

std::shared_ptr<ReplicateState> find(const Module& module) {
  const std::lock_guard lock(states_mutex);
  const auto found = states().find(&module);
  return found == states().end() ? nullptr : found->second.lock();
}

data_parallel::Replica& replica_of(ReplicateState& state, const Module& module) {
  if (!state.replica) {
    const OpModesOff once;  // making replicas equal is no part of a step that is compiled
    state.replica.emplace("replicate", data_parallel::parameters_of(module, state.options.ignored_modules),
                          data_parallel::buffers_of(module, state.options.ignored_modules), state.options, state.mode);
    for (auto& hook : state.queued) state.replica->register_comm_hook(std::move(hook));
    state.queued.clear();
  }
  return *state.replica;
}

}  // namespace

detail::ReplicateState::~ReplicateState() {
  const std::lock_guard lock(states_mutex);
  states().erase(module);
}

Replicated replicate(Module& module, const ReplicateOptions& options) {
  TESSERA_CHECK(!find(module), UsageError, "replicate: ", class_name(module),
                " is replicated already; its gradients would be averaged twice");
  TESSERA_CHECK(!options.device_mesh || options.device_mesh.ndim() == 1, UsageError, "replicate: device_mesh ",
                options.device_mesh, " has ", options.device_mesh.ndim(), " axes; give the one to average over");
  hook_point(module);  // throws where there is none
  auto state = std::make_shared<ReplicateState>();
  state->module = &module;
  state->options = options;
  state->mode = ReducerModeScope::current();
  {
    const std::lock_guard lock(states_mutex);
    states()[&module] = state;
  }
  const HookOptions not_cloneable{.not_cloneable = "replicate() was applied to it; clone it before"};
  register_forward_pre_hook(
      module,
      [state](Module& m, const Tensors&) {
        auto& replica = replica_of(*state, m);
        replica.set_requires_gradient_sync(state->sync);
        replica.before_forward();
      },
      not_cloneable);
  register_forward_hook(
      module, [state](Module&, const Tensors&, const Tensors& outputs) { state->replica->after_forward(outputs); },
      not_cloneable);
  Replicated handle;
  handle.state_ = std::move(state);
  return handle;
}

Replicated replicated(const Module& module) {
  Replicated handle;
  handle.state_ = find(module);
  TESSERA_CHECK(handle.state_, UsageError, class_name(module), " was not given to replicate()");
  return handle;
}

void Replicated::set_requires_gradient_sync(bool sync) {
  state_->sync = sync;
  if (state_->replica) state_->replica->set_requires_gradient_sync(sync);
}

void Replicated::add_hook(CommHook hook) {
  if (state_->replica) return state_->replica->register_comm_hook(std::move(hook));
  TESSERA_CHECK(state_->queued.empty(), UsageError, "replicate: a second comm hook; both would reduce");
  state_->queued.push_back(std::move(hook));
}

const data_parallel::Replica* Replicated::replica() const { return state_->replica ? &*state_->replica : nullptr; }

}  // namespace tessera
