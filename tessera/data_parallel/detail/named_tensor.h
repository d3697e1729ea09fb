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

// The parameters, and the buffers, at and below `module`, without those at and below the `ignored` modules. A tied
// parameter is listed once, under its first name.
NamedTensors parameters_of(const torch::nn::Module& module, const std::vector<const torch::nn::Module*>& ignored = {});
NamedTensors buffers_of(const torch::nn::Module& module, const std::vector<const torch::nn::Module*>& ignored = {});
// Of parameters_of(): those of an Embedding or EmbeddingBag with sparse(true), whose gradients are sparse.
std::vector<at::Tensor> sparse_parameters_of(const torch::nn::Module& module,
                                             const std::vector<const torch::nn::Module*>& ignored = {});

// The type of the device that the parameters are on: "cuda". "cpu" if the list is empty or on the meta device.
std::string device_type_of(const NamedTensors& parameters);

std::string join_names(const std::vector<std::string>& names, size_t most = 8);  // a, b, c and 12 more

}  // namespace tessera::data_parallel
