#pragma once
#include "tessera/data_parallel/detail/named_tensor.h"

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

// Says, while alive, that a unit has these parameters, and has taken them out of these modules.
std::shared_ptr<void> claim(const std::string& unit, const std::vector<at::Tensor>& parameters,
                            const std::vector<torch::nn::Module*>& modules);

// Throws UsageError if a unit of any module has one of the parameters that are to be taken from `module`, or has taken
// some out of it or out of one below it.
void check_unclaimed(const char* what, const torch::nn::Module& module, const NamedTensors& parameters);

}  // namespace tessera::data_parallel::fsdp
