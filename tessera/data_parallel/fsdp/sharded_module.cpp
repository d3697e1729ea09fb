#include "tessera/data_parallel/fsdp/sharded_module.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/fsdp/tree.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>

namespace tessera::data_parallel::fsdp {
namespace {

std::mutex table_mutex;
std::map<const Module*, std::weak_ptr<ShardedModule>>& table() {
  static std::map<const Module*, std::weak_ptr<ShardedModule>> it;
  return it;
}

Tensors cast(const Tensors& tensors, std::optional<c10::ScalarType> dtype) {
  auto result = tensors;
  for (auto& t : result)
    if (dtype && t.defined() && t.is_floating_point()) t = t.to(*dtype);
  return result;
}

}  // namespace

Tensors run(ShardedModule& sharded, const Module& module, const Tensors& inputs, const ForwardCall& forward) {
  if (sharded.summoned) {
    TESSERA_CHECK(!at::GradMode::is_enabled(), UsageError, "module ", class_name(module),
                  " runs inside of summon_full_params(), where it can compute no gradients; run it outside, or under ",
                  "torch::NoGradGuard");
    return forward(inputs);
  }
  if (!sharded.schedule) make_tree(sharded);
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
  for (const auto* each : modules) table().erase(each);
}

std::shared_ptr<ShardedModule> find(const Module& module) {
  const std::lock_guard lock(table_mutex);
  const auto found = table().find(&module);
  return found == table().end() ? nullptr : found->second.lock();
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

void check_not_sharded(const char* what, const Module& module, const NamedTensors& parameters) {
  std::vector<std::shared_ptr<ShardedModule>> all;  // let go of after the lock: the last one to hold one takes it
  {
    const std::lock_guard lock(table_mutex);
    for (const auto& [at, held] : table())
      if (auto sharded = held.lock()) all.push_back(std::move(sharded));
  }
  const auto inner = find_all(module);
  const auto is_inside = [&](const auto& sharded) {
    return std::find(inner.begin(), inner.end(), sharded) != inner.end();
  };
  for (const auto& sharded : all)
    for (const auto& below : module.modules())
      TESSERA_CHECK(!sharded->registration || is_inside(sharded) || !sharded->registration->took_from(*below),
                    UsageError, what, ": the parameters of ", class_name(*below), " are part of the flat parameter of ",
                    sharded->turn->unit->name(), " already; shard inner modules before outer ones");
  std::unordered_map<const void*, const ShardedModule*> owners;
  for (const auto& sharded : all)
    for (const auto& member : sharded->turn->unit->members())
      owners.emplace(member.handle.unsafeGetTensorImpl(), sharded.get());
  for (const auto& [name, value] : parameters)
    if (const auto found = owners.find(value.unsafeGetTensorImpl()); found != owners.end())
      TESSERA_FAIL(UsageError, what, ": parameter ", name, " is sharded already, as part of ",
                   found->second->turn->unit->name(),
                   "; shard inner modules before outer ones, and a parameter that modules share with one of them");
}

void check_can_attach(const char* what, Module& module) {
  TESSERA_CHECK(!find(module), UsageError, what, ": ", class_name(module), " is sharded already");
  hook_point(module);  // throws where there is none
}

std::shared_ptr<ShardedModule> attach(std::vector<Module*> modules, std::shared_ptr<Turn> turn) {
  auto sharded = std::make_shared<ShardedModule>(std::move(modules), std::move(turn));
  for (auto* module : sharded->modules) {
    {
      const std::lock_guard lock(table_mutex);
      table()[module] = sharded;
    }
    register_around_hook(*module,
                         [sharded](Module& m, const Tensors& inputs, const ForwardCall& forward) {
                           return run(*sharded, m, inputs, forward);
                         },
                         {.not_cloneable = "its parameters are sharded; clone it before"});
  }
  return sharded;
}

}  // namespace tessera::data_parallel::fsdp

std::vector<const torch::nn::Module*> tessera::fsdp_modules(const torch::nn::Module& module) {
  std::vector<const torch::nn::Module*> found;
  for (const auto& sharded : data_parallel::fsdp::find_all(module))
    found.insert(found.end(), sharded->modules.begin(), sharded->modules.end());
  return found;
}
