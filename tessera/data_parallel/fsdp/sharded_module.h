#pragma once
#include "tessera/data_parallel/fsdp/registry.h"
#include "tessera/data_parallel/fsdp/schedule.h"

#include <torch/nn/module.h>

#include <memory>
#include <vector>

// A module whose parameters are a unit: hooks on it call the schedule. Found again by the module.
namespace tessera::data_parallel::fsdp {

using torch::nn::Module;

struct ShardedModule {
  ShardedModule(const Module* module, std::shared_ptr<Turn> turn) : module(module), turn(std::move(turn)) {}
  ~ShardedModule();
  ShardedModule(const ShardedModule&) = delete;

  const Module* module;
  std::shared_ptr<Turn> turn;
  std::optional<Registration> registration;  // where a flat parameter stands for the originals
  std::shared_ptr<Schedule> schedule;        // the tree's; made in the first forward, by the root
};

// Hooks up the module, which must be able to have hooks and not be sharded yet. It keeps the state alive.
std::shared_ptr<ShardedModule> attach(Module& module, std::shared_ptr<Turn> turn);

std::shared_ptr<ShardedModule> find(const Module& module);                   // null if it is not sharded
std::vector<std::shared_ptr<ShardedModule>> find_all(const Module& module);  // it and those below, outer ones first
// Throws UsageError if the module, by itself, is sharded already or cannot have hooks.
void check_can_attach(const char* what, Module& module);

}  // namespace tessera::data_parallel::fsdp

namespace tessera {

// The modules in `module`, itself included, that were sharded; outer ones first.
std::vector<const torch::nn::Module*> fsdp_modules(const torch::nn::Module& module);

}  // namespace tessera
