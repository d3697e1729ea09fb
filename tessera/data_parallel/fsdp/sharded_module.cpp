#include "tessera/data_parallel/fsdp/sharded_module.h"

#include "tessera/base/error.h"
#include "tessera/nn/hooks.h"
#include "tessera/nn/module_tree.h"

#include <map>
#include <mutex>

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
  for (const auto& sharded : find_all(*root.module)) {
    TESSERA_CHECK(!sharded->schedule, UsageError, "module ", class_name(*sharded->module), " (unit ",
                  sharded->turn->unit->name(), ") ran by itself before ", class_name(*root.module),
                  ", which it is part of; run the outer one first");
    sharded->schedule = schedule;
    schedule->add(sharded->turn);
  }
}

Tensors run(ShardedModule& sharded, const Tensors& inputs, const ForwardCall& forward) {
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
  if (auto own = find(module)) all.push_back(std::move(own));
  for (const auto& child : module.children())
    for (auto& below : find_all(*child)) all.push_back(std::move(below));
  return all;
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
