#include "tessera/data_parallel/replicate.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/averages_in_backward.h"
#include "tessera/data_parallel/detail/wrapper_module.h"
#include "tessera/data_parallel/fsdp/detail/api/ignored_modules.h"
#include "tessera/nn/module_tree.h"
#include "tessera/tracing/op_mode.h"

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
  std::vector<CommHook> queued_hooks;
  std::optional<data_parallel::Replica> replica;

  ~ReplicateState();
};

}  // namespace detail

namespace {

using detail::ReplicateState;

// The modules that were given to replicate(). The module's hooks own the state, whose destructor removes it from here.
std::mutex replicated_mutex;
std::map<const Module*, std::weak_ptr<ReplicateState>>& replicated_modules() {
  static std::map<const Module*, std::weak_ptr<ReplicateState>> it;
  return it;
}

std::shared_ptr<ReplicateState> find_replicate_state(const Module& module) {
  const std::lock_guard lock(replicated_mutex);
  const auto found = replicated_modules().find(&module);
  return found == replicated_modules().end() ? nullptr : found->second.lock();
}

data_parallel::Replica& replica_of(ReplicateState& state, const Module& module) {
  if (!state.replica) {
    const OpModesOff once;  // setup is not part of a compiled step
    state.replica.emplace("replicate", module, state.options, state.options.ignored_modules, state.mode);
    for (auto& hook : state.queued_hooks) state.replica->register_comm_hook(std::move(hook));
    state.queued_hooks.clear();
  }
  return *state.replica;
}

}  // namespace

detail::ReplicateState::~ReplicateState() {
  const std::lock_guard lock(replicated_mutex);
  replicated_modules().erase(module);
}

torch::nn::Module& replicate(torch::nn::Module& module, const ReplicateOptions& options) {
  TESSERA_CHECK(!find_replicate_state(module), UsageError, "replicate: ", class_name(module),
                " is replicated already; call replicate() once, or gradients are averaged twice");
  TESSERA_CHECK(!options.device_mesh || options.device_mesh.ndim() == 1, UsageError, "replicate: device_mesh ",
                options.device_mesh, " has ", options.device_mesh.ndim(), " axes; give the one to average over");
  TESSERA_CHECK(!data_parallel::fsdp::is_module_container(module), UsageError, "replicate: a ", class_name(module),
                " has no forward, so nothing would average its gradients; call replicate for the module around it, or ",
                "for each module in it");
  hook_point(module);  // throws if it has none
  auto state = std::make_shared<ReplicateState>();
  state->module = &module;
  state->options = options;
  state->mode = ReducerModeScope::current();
  {
    const std::lock_guard lock(replicated_mutex);
    replicated_modules()[&module] = state;
  }
  const HookOptions not_cloneable{.not_cloneable = "replicate() was applied to it; clone it before replicate()"};
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
  return module;
}

bool data_parallel::averages_in_backward(const Module& module) {
  const auto* wrapper = dynamic_cast<const WrapperModule*>(&module);
  return find_replicate_state(module) || (wrapper && wrapper->averages_in_backward());
}

Replicated replicated(const Module& module) {
  Replicated handle;
  handle.state_ = find_replicate_state(module);
  TESSERA_CHECK(handle.state_, UsageError, class_name(module), " was not given to replicate()");
  return handle;
}

void Replicated::set_requires_gradient_sync(bool sync) {
  state_->sync = sync;
  if (state_->replica) state_->replica->set_requires_gradient_sync(sync);
}

void Replicated::add_hook(CommHook hook) {
  if (state_->replica) return state_->replica->register_comm_hook(std::move(hook));
  TESSERA_CHECK(state_->queued_hooks.empty(), UsageError,
                "replicate: a comm hook is registered already; register only one, or gradients are reduced twice");
  state_->queued_hooks.push_back(std::move(hook));
}

const data_parallel::Replica* Replicated::replica() const { return state_->replica ? &*state_->replica : nullptr; }

}  // namespace tessera
