#pragma once
#include "tessera/data_parallel/fsdp/detail/api/registry.h"
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"
#include "tessera/nn/hooks.h"

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <vector>

// Modules whose parameters are a unit: hooks on them call the schedule. Found again by the module.
namespace tessera::data_parallel::fsdp {

using torch::nn::Module;

struct ShardedModule {
  ShardedModule(std::vector<Module*> modules, std::shared_ptr<Turn> turn);
  ~ShardedModule();
  ShardedModule(const ShardedModule&) = delete;

  const Module* module;  // the first of them
  std::vector<Module*> modules;
  std::shared_ptr<Turn> turn;
  std::optional<Registration> registration;  // where a flat parameter stands for the originals
  std::vector<const void*> unhooked;         // parameters that are sharded by their placement, see unhooked.h
  std::shared_ptr<Schedule> schedule;        // the tree's; made in the first forward, by the root
  std::shared_ptr<void> claim;               // to its parameters (claims.h)
  bool summoned = false;                     // its parameters are whole because someone asked to see them
  DeviceMesh mesh = {};                      // flat: over which it is cut and copied,
  std::optional<int64_t> shard_axis = {};    // and which axis cuts; none does in NO_SHARD
};

// Hooks up the modules, which must be able to have hooks and not be sharded yet. They keep the state alive.
std::shared_ptr<ShardedModule> attach(std::vector<Module*> modules, std::shared_ptr<Turn> turn);
inline std::shared_ptr<ShardedModule> attach(Module& module, std::shared_ptr<Turn> turn) {
  return attach(std::vector<Module*>{&module}, std::move(turn));
}

// The same without hooks: only to be found. Keep: as long as the first of the modules lives; else somebody has to.
std::shared_ptr<ShardedModule> list(std::vector<Module*> modules, std::shared_ptr<Turn> turn, bool keep);

std::shared_ptr<ShardedModule> find(const Module& module);  // null if it is not sharded
// It and those below, outer ones first, each once.
std::vector<std::shared_ptr<ShardedModule>> find_all(const Module& module);
// Throws UsageError if the module, by itself, is sharded already or cannot have hooks.
void check_can_attach(const char* what, Module& module);

// One call of a module that is sharded: `forward` with whole parameters. The hook of attach(); for methods beside
// forward, which no hook sees.
Tensors run(ShardedModule& sharded, const Module& module, const Tensors& inputs, const ForwardCall& forward);

}  // namespace tessera::data_parallel::fsdp

namespace tessera {

// The modules in `module`, itself included, that were sharded; outer ones first.
std::vector<const torch::nn::Module*> fsdp_modules(const torch::nn::Module& module);

}  // namespace tessera
