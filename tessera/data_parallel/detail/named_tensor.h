#pragma once
#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

namespace tessera::data_parallel {

struct NamedTensor {
  std::string name;
  at::Tensor value;
};
using NamedTensors = std::vector<NamedTensor>;

// Each parameter once, under its first name: tied ones are one parameter. Without those of the `ignored` modules and
// of what is below them.
NamedTensors parameters_of(const torch::nn::Module& module, const std::vector<const torch::nn::Module*>& ignored = {});
NamedTensors buffers_of(const torch::nn::Module& module, const std::vector<const torch::nn::Module*>& ignored = {});

std::string join_names(const std::vector<std::string>& names, size_t most = 8);  // a, b, c and 12 more

}  // namespace tessera::data_parallel
