#pragma once
#include "tessera/data_parallel/detail/named_tensor.h"

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <vector>

namespace tessera::data_parallel::fsdp {

using torch::nn::Module;

// What sharding leaves alone: modules with everything below them, and parameters.
struct Ignored {
  std::vector<const Module*> modules;
  std::vector<at::Tensor> parameters;

  bool has(const Module& module) const;
  // Those of `module` and below that are left to shard. `taken`: modules that others have sharded.
  NamedTensors parameters_left(const Module& module, const std::vector<const Module*>& taken = {}) const;
  NamedTensors buffers_left(const Module& module, const std::vector<const Module*>& taken = {}) const;
  // Throws UsageError if something is not part of `root`, or is sharded already.
  void check(const char* what, const Module& root) const;
};

// Holds modules and has no forward: hooks on it never run.
bool is_list(const Module& module);

}  // namespace tessera::data_parallel::fsdp
