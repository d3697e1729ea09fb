#pragma once
#include "tessera/data_parallel/fsdp/detail/api/module_registration.h"
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"
#include "tessera/nn/hooks.h"

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <vector>

namespace tessera::data_parallel::fsdp {

using torch::nn::Module;

// One or more modules whose parameters are one group. Forward hooks on the modules call the schedule.
struct ShardedModule {
  ShardedModule(std::vector<Module*> modules, std::shared_ptr<ScheduledGroup> scheduled);
  ~ShardedModule();
  ShardedModule(const ShardedModule&) = delete;
  ParamGroup& group() const { return *scheduled->group; }

  const Module* module;  // the first one
  std::vector<Module*> modules;
  std::shared_ptr<ScheduledGroup> scheduled;
  std::optional<ModuleRegistration> registration;  // set if a flat parameter replaces the unflattened parameters
  std::vector<const void*> unhooked_params;        // parameters that are sharded by placement only (unhooked_modules.h)
  std::shared_ptr<Schedule> schedule;              // of the module tree; created in the first forward, by the root
  std::shared_ptr<void> ownership;                 // of its parameters (parameter_ownership.h)
  bool summoned = false;                           // parameters are unsharded by summon_full_params()
  DeviceMesh mesh = {};                            // flat parameter: the mesh over which it is sharded and replicated,
  std::optional<int64_t> shard_axis = {};          // and the axis over which it is sharded; none with NO_SHARD
};

// Creates the state and puts hooks on the modules, which keep the state alive.
// Requires: the modules can have hooks and are not sharded (check_can_attach).
std::shared_ptr<ShardedModule> attach(std::vector<Module*> modules, std::shared_ptr<ScheduledGroup> scheduled);
inline std::shared_ptr<ShardedModule> attach(Module& module, std::shared_ptr<ScheduledGroup> scheduled) {
  return attach(std::vector<Module*>{&module}, std::move(scheduled));
}

// Creates the state without hooks, so that find_sharded_module() returns it. With keep_alive it lives as long as the
// first module; otherwise the caller keeps it alive.
std::shared_ptr<ShardedModule> register_modules(std::vector<Module*> modules, std::shared_ptr<ScheduledGroup> scheduled,
                                                bool keep_alive);

std::shared_ptr<ShardedModule> find_sharded_module(const Module& module);  // null if it is not sharded
// The sharded modules at and below `module`, outer ones first, each once.
std::vector<std::shared_ptr<ShardedModule>> find_sharded_modules(const Module& module);
// Throws UsageError if the module itself is sharded already or cannot have hooks.
void check_can_attach(const char* what, Module& module);

// Runs `forward` of a sharded module with unsharded parameters. attach() registers it as the forward hook. Also used
// for methods other than forward, which have no hook.
Tensors run(ShardedModule& sharded, const Module& module, const Tensors& inputs, const ForwardCall& forward);

}  // namespace tessera::data_parallel::fsdp

namespace tessera {

// The modules at and below `module` that are sharded, outer ones first.
std::vector<const torch::nn::Module*> fsdp_modules(const torch::nn::Module& module);

}  // namespace tessera
