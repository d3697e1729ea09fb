#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"
#include "tessera/data_parallel/fsdp/detail/engine/module_tree_setup.h"
#include "tessera/nn/module_tree.h"
#include "tessera/state/detail/module_slots.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace tessera::data_parallel::fsdp {
namespace {

struct RegisteredModule {
  std::weak_ptr<Module> module;  // expired: another module may have the same address now
  std::weak_ptr<ShardedModule> state;
  std::shared_ptr<ShardedModule> keep_alive = {};
};

std::mutex registry_mutex;
std::map<const Module*, RegisteredModule>& registry() {
  static auto* it = new std::map<const Module*, RegisteredModule>;  // never destroyed: a static module may come later
  return *it;
}

// A state dict has sharded values, also between forward and backward. The buffer is kept, so that backward does not
// communicate: one rank alone may ask for its state dict.
void reshard_for_state_dict(const Module& module) {
  for (const auto& sharded : find_sharded_modules(module)) {
    if (sharded->summoned || !sharded->group().is_unsharded()) continue;
    TESSERA_CHECK(
        (!sharded->schedule || !sharded->schedule->in_forward()) && torch::autograd::get_current_graph_task_id() == -1,
        UsageError, "the state dict of ", class_name(module), " was requested inside of its forward or ",
        "backward, while the parameters of ", sharded->group().name(), " are unsharded; request it outside");
    sharded->group().reshard_keep_buffer();
  }
}

Tensors cast_to(const Tensors& tensors, std::optional<c10::ScalarType> dtype) {
  auto result = tensors;
  for (auto& t : result)
    if (dtype && t.defined() && t.is_floating_point()) t = t.to(*dtype);
  return result;
}

}  // namespace

Tensors run(ShardedModule& sharded, const Module& module, const Tensors& inputs, const ForwardCall& forward) {
  if (!sharded.schedule) {
    const OpModesOff not_recorded;  // setup is not part of a compiled step
    set_up_module_tree(sharded);
  }
  if (sharded.summoned) {
    TESSERA_CHECK(!at::GradMode::is_enabled(), UsageError, "module ", class_name(module),
                  " runs inside summon_full_params(), where gradients cannot be computed; run it outside, or under ",
                  "torch::NoGradGuard");
    return forward(inputs);
  }
  const auto schedule = sharded.schedule;  // forward may destroy the module
  auto& scheduled = *sharded.scheduled;
  try {
    schedule->before_forward(scheduled);
    Tensors outputs;
    {
      const SavedTensorHooks pack(scheduled.group->packer());
      outputs = cast_to(forward(cast_to(inputs, scheduled.cast_inputs)), scheduled.cast_outputs);
    }
    schedule->after_forward(scheduled, &module, outputs);
    return outputs;
  } catch (...) {
    schedule->forward_failed();
    throw;
  }
}

ShardedModule::ShardedModule(std::vector<Module*> of, std::shared_ptr<ScheduledGroup> scheduled)
    : module(of.front()), modules(std::move(of)), scheduled(std::move(scheduled)) {
  this->scheduled->num_modules = modules.size();
}

ShardedModule::~ShardedModule() {
  const std::lock_guard lock(registry_mutex);
  for (const auto* each : modules) {
    const auto found = registry().find(each);
    if (found != registry().end() && found->second.state.expired()) registry().erase(found);
  }
}

std::shared_ptr<ShardedModule> find_sharded_module(const Module& module) {
  const std::lock_guard lock(registry_mutex);
  const auto found = registry().find(&module);
  return found == registry().end() || found->second.module.expired() ? nullptr : found->second.state.lock();
}

std::vector<std::shared_ptr<ShardedModule>> find_sharded_modules(const Module& module) {
  std::vector<std::shared_ptr<ShardedModule>> all;
  const auto add = [&](std::shared_ptr<ShardedModule> sharded) {
    if (sharded && std::find(all.begin(), all.end(), sharded) == all.end()) all.push_back(std::move(sharded));
  };
  add(find_sharded_module(module));
  for (const auto& child : module.children())
    for (auto& below : find_sharded_modules(*child)) add(std::move(below));
  return all;
}

void check_can_attach(const char* what, Module& module) {
  TESSERA_CHECK(!find_sharded_module(module), UsageError, what, ": ", class_name(module), " is sharded already");
  hook_point(module);  // throws if it has none
}

std::shared_ptr<ShardedModule> register_modules(std::vector<Module*> modules, std::shared_ptr<ScheduledGroup> scheduled,
                                                bool keep_alive) {
  static const bool once = (tessera::detail::before_slots(reshard_for_state_dict), true);
  static_cast<void>(once);
  auto sharded = std::make_shared<ShardedModule>(std::move(modules), std::move(scheduled));
  std::vector<RegisteredModule> expired;  // destroyed after the lock is released: their destructor takes it
  const std::lock_guard lock(registry_mutex);
  for (auto& [module, registered] : registry())
    if (registered.keep_alive && registered.module.expired())
      expired.push_back({{}, {}, std::move(registered.keep_alive)});
  for (auto* module : sharded->modules) registry()[module] = {module->weak_from_this(), sharded};
  if (keep_alive) registry()[sharded->module].keep_alive = sharded;
  return sharded;
}

std::shared_ptr<ShardedModule> attach(std::vector<Module*> modules, std::shared_ptr<ScheduledGroup> scheduled) {
  auto sharded = register_modules(std::move(modules), std::move(scheduled), /*keep_alive=*/false);
  Tensors parameters;
  for (const auto& param : sharded->group().params()) parameters.push_back(param.tensor);
  sharded->ownership = own_parameters(sharded->group().name(), parameters, {});
  for (auto* module : sharded->modules)
    register_around_hook(*module,
                         [sharded](Module& m, const Tensors& inputs, const ForwardCall& forward) {
                           return run(*sharded, m, inputs, forward);
                         },
                         {.not_cloneable = "its parameters are sharded; clone it before sharding"});
  return sharded;
}

}  // namespace tessera::data_parallel::fsdp

std::vector<const torch::nn::Module*> tessera::fsdp_modules(const torch::nn::Module& module) {
  std::vector<const torch::nn::Module*> found;
  for (const auto& sharded : data_parallel::fsdp::find_sharded_modules(module))
    found.insert(found.end(), sharded->modules.begin(), sharded->modules.end());
  return found;
}
