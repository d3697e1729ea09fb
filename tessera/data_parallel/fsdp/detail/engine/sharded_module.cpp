#include "tessera/data_parallel/fsdp/detail/engine/sharded_module.h"

#include "tessera/base/error.h"
#include "tessera/tracing/op_mode.h"
#include "tessera/data_parallel/fsdp/detail/api/parameter_ownership.h"
#include "tessera/data_parallel/fsdp/detail/engine/module_tree_setup.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <mutex>

namespace tessera::data_parallel::fsdp {
namespace {

struct Listed {
  std::weak_ptr<Module> module;  // another one may come to live at the same address
  std::weak_ptr<ShardedModule> state;
  std::shared_ptr<ShardedModule> kept = {};
};

std::mutex table_mutex;
std::map<const Module*, Listed>& table() {
  static auto* it = new std::map<const Module*, Listed>;  // modules may outlive everything
  return *it;
}

Tensors cast(const Tensors& tensors, std::optional<c10::ScalarType> dtype) {
  auto result = tensors;
  for (auto& t : result)
    if (dtype && t.defined() && t.is_floating_point()) t = t.to(*dtype);
  return result;
}

}  // namespace

Tensors run(ShardedModule& sharded, const Module& module, const Tensors& inputs, const ForwardCall& forward) {
  if (!sharded.schedule) {
    const OpModesOff not_of_the_step;  // that may be being compiled
    make_tree(sharded);
  }
  if (sharded.summoned) {
    TESSERA_CHECK(!at::GradMode::is_enabled(), UsageError, "module ", class_name(module),
                  " runs inside of summon_full_params(), where it can compute no gradients; run it outside, or under ",
                  "torch::NoGradGuard");
    return forward(inputs);
  }
  const auto schedule = sharded.schedule;  // forward may drop the module
  auto& turn = *sharded.turn;
  try {
    schedule->before_forward(turn);
    Tensors outputs;
    {
      const PackScope keep(turn.unit->packer());
      outputs = cast(forward(cast(inputs, turn.cast_inputs)), turn.cast_outputs);
    }
    schedule->after_forward(turn, &module, outputs);
    return outputs;
  } catch (...) {
    schedule->forward_failed();
    throw;
  }
}

ShardedModule::ShardedModule(std::vector<Module*> of, std::shared_ptr<Turn> turn)
    : module(of.front()), modules(std::move(of)), turn(std::move(turn)) {
  this->turn->calls = modules.size();
}

ShardedModule::~ShardedModule() {
  const std::lock_guard lock(table_mutex);
  for (const auto* each : modules) {
    const auto found = table().find(each);
    if (found != table().end() && found->second.state.expired()) table().erase(found);
  }
}

std::shared_ptr<ShardedModule> find(const Module& module) {
  const std::lock_guard lock(table_mutex);
  const auto found = table().find(&module);
  return found == table().end() || found->second.module.expired() ? nullptr : found->second.state.lock();
}

std::vector<std::shared_ptr<ShardedModule>> find_all(const Module& module) {
  std::vector<std::shared_ptr<ShardedModule>> all;
  const auto add = [&](std::shared_ptr<ShardedModule> sharded) {
    if (sharded && std::find(all.begin(), all.end(), sharded) == all.end()) all.push_back(std::move(sharded));
  };
  add(find(module));
  for (const auto& child : module.children())
    for (auto& below : find_all(*child)) add(std::move(below));
  return all;
}

void check_can_attach(const char* what, Module& module) {
  TESSERA_CHECK(!find(module), UsageError, what, ": ", class_name(module), " is sharded already");
  hook_point(module);  // throws where there is none
}

std::shared_ptr<ShardedModule> list(std::vector<Module*> modules, std::shared_ptr<Turn> turn, bool keep) {
  auto sharded = std::make_shared<ShardedModule>(std::move(modules), std::move(turn));
  std::vector<Listed> gone;  // let go of when the table is free again: their end takes them out of it
  const std::lock_guard lock(table_mutex);
  for (auto& [module, listed] : table())
    if (listed.kept && listed.module.expired()) gone.push_back({{}, {}, std::move(listed.kept)});
  for (auto* module : sharded->modules) table()[module] = {module->weak_from_this(), sharded};
  if (keep) table()[sharded->module].kept = sharded;
  return sharded;
}

std::shared_ptr<ShardedModule> attach(std::vector<Module*> modules, std::shared_ptr<Turn> turn) {
  auto sharded = list(std::move(modules), std::move(turn), /*keep=*/false);
  std::vector<at::Tensor> parameters;
  for (const auto& member : sharded->turn->unit->members()) parameters.push_back(member.handle);
  sharded->claim = claim(sharded->turn->unit->name(), parameters, {});
  for (auto* module : sharded->modules)
    register_around_hook(*module,
                         [sharded](Module& m, const Tensors& inputs, const ForwardCall& forward) {
                           return run(*sharded, m, inputs, forward);
                         },
                         {.not_cloneable = "its parameters are sharded; clone it before"});
  return sharded;
}

}  // namespace tessera::data_parallel::fsdp

std::vector<const torch::nn::Module*> tessera::fsdp_modules(const torch::nn::Module& module) {
  std::vector<const torch::nn::Module*> found;
  for (const auto& sharded : data_parallel::fsdp::find_all(module))
    found.insert(found.end(), sharded->modules.begin(), sharded->modules.end());
  return found;
}
