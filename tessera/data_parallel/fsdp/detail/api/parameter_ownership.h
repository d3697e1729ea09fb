#pragma once
#include "tessera/data_parallel/detail/named_tensor.h"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

// Records that parameter group `group` owns these parameters and has removed them from these modules (a flat
// parameter), as long as the returned object is alive.
[[nodiscard]] std::shared_ptr<void> own_parameters(const std::string& group, const std::vector<at::Tensor>& parameters,
                                                   const std::vector<torch::nn::Module*>& modules);

// Throws UsageError if a group owns one of the parameters of `module` that are to be sharded, or has removed parameters
// from `module` or from a module below it.
void check_not_owned(const char* what, const torch::nn::Module& module, const NamedTensors& parameters);

}  // namespace tessera::data_parallel::fsdp
