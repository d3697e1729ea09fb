#pragma once
#include "tessera/data_parallel/detail/named_tensor.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <vector>

namespace tessera::data_parallel::fsdp {

using torch::nn::Module;

// Modules (with all modules below them) and parameters that are not sharded.
struct IgnoredModules {
  std::vector<const Module*> modules;
  std::vector<at::Tensor> parameters;

  bool has(const Module& module) const;
  // The parameters and buffers at and below `module` that are neither ignored nor in `already_sharded` modules.
  NamedTensors parameters_to_shard(const Module& module, const std::vector<const Module*>& already_sharded = {}) const;
  NamedTensors buffers_to_shard(const Module& module, const std::vector<const Module*>& already_sharded = {}) const;
  // Throws UsageError if an ignored module or parameter is not part of `root` or is sharded already.
  void check(const char* what, const Module& root) const;
};

// True for ModuleList and ModuleDict: they have no forward, so hooks on them never run.
bool is_module_container(const Module& module);

}  // namespace tessera::data_parallel::fsdp
