#include "tessera/data_parallel/fsdp/sharded_module.h"

#include "tessera/base/error.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>

namespace tessera::data_parallel::fsdp {
namespace {

std::mutex table_mutex;
std::map<const Module*, std::weak_ptr<ShardedModule>>& table() {
  static std::map<const Module*, std::weak_ptr<ShardedModule>> it;
  return it;
}

// The first of a tree to run is its root: everything below it follows one schedule.
void adopt(ShardedModule& root) {
  auto schedule = std::make_shared<Schedule>();
  root.is_root = true;
  if (root.set_up) root.set_up(*schedule);
  for (const auto& sharded : find_all(*root.module)) {
    TESSERA_CHECK(!sharded->schedule, UsageError, "module ", class_name(*sharded->module), " (unit ",
                  sharded->turn->unit->name(), ") ran by itself before ", class_name(*root.module),
                  ", which it is part of; run the outer one first");
    sharded->schedule = schedule;
    schedule->add(sharded->turn);
  }
}

Tensors run(ShardedModule& sharded, const Tensors& inputs, const ForwardCall& forward) {
  if (sharded.summoned) {
    TESSERA_CHECK(!at::GradMode::is_enabled(), UsageError, "module ", class_name(*sharded.module),
                  " runs inside of summon_full_params(), where it can compute no gradients; run it outside, or under ",
                  "torch::NoGradGuard");
    return forward(inputs);
  }
  if (!sharded.schedule) adopt(sharded);
  auto& schedule = *sharded.schedule;
  schedule.before_forward(*sharded.turn);
  struct Failed {
    Schedule* schedule;
    ~Failed() {
      if (schedule) schedule->forward_failed();
    }
  } failed{&schedule};
  Tensors outputs;
  {
    const PackScope keep(sharded.turn->unit->packer());
    outputs = forward(inputs);
  }
  failed.schedule = nullptr;
  schedule.after_forward(*sharded.turn, outputs);
  return outputs;
}

}  // namespace

ShardedModule::~ShardedModule() {
  const std::lock_guard lock(table_mutex);
  table().erase(module);
}

std::shared_ptr<ShardedModule> find(const Module& module) {
  const std::lock_guard lock(table_mutex);
  const auto found = table().find(&module);
  return found == table().end() ? nullptr : found->second.lock();
}

std::vector<std::shared_ptr<ShardedModule>> find_all(const Module& module) {
  std::vector<std::shared_ptr<ShardedModule>> all;
  std::unordered_set<const Module*> seen;  // a module may be part of several
  const std::function<void(const Module&)> into = [&](const Module& at) {
    if (!seen.insert(&at).second) return;
    if (auto own = find(at)) all.push_back(std::move(own));
    for (const auto& child : at.children()) into(*child);
  };
  into(module);
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

std::shared_ptr<ShardedModule> attach(Module& module, std::shared_ptr<Turn> turn) {
  auto sharded = std::make_shared<ShardedModule>(&module, std::move(turn));
  {
    const std::lock_guard lock(table_mutex);
    table()[&module] = sharded;
  }
  register_around_hook(
      module,
      [sharded](Module&, const Tensors& inputs, const ForwardCall& forward) { return run(*sharded, inputs, forward); },
      {.not_cloneable = "its parameters are sharded; clone it before"});
  return sharded;
}

}  // namespace tessera::data_parallel::fsdp

std::vector<const torch::nn::Module*> tessera::fsdp_modules(const torch::nn::Module& module) {
  std::vector<const torch::nn::Module*> found;
  for (const auto& sharded : data_parallel::fsdp::find_all(module)) found.push_back(sharded->module);
  return found;
}
