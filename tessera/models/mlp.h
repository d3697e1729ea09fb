#pragma once
#include "tessera/nn/modules.h"

#include <optional>
#include <string>
#include <vector>

// Small MLPs, as in PyTorch's tests of parallel training. One class; the configurations below define the models.
// Example:  MLP model(mlp_module());
namespace tessera::models {

// The activation function after a layer.
enum class Activation { None, Relu, Sigmoid };

// One Linear and its activation.
struct MLPLayer {
  std::string name;  // of the module
  int64_t in, out;   // features
  Activation then = Activation::None;
  bool operator==(const MLPLayer&) const = default;
};

// The layers of an MLP.
struct MLPConfig {
  std::vector<MLPLayer> layers;
  bool bias = true;
  // The module initializes its weights from a generator of its own with this seed, so they are equal on all ranks, even
  // if ranks are threads. nullopt: from the default generator.
  std::optional<uint64_t> seed = {};
  bool operator==(const MLPConfig&) const = default;
};

// The models of PyTorch's tests: MLPModule, SimpleModel, SimpleMLP, and four Linear layers.
MLPConfig mlp_module(bool bias = true);        // net1 10 -> 16, relu, net2 16 -> 10; seed 5
MLPConfig simple_model();                      // net1 5 -> 8, relu, net2 8 -> 4, net3 4 -> 12
MLPConfig simple_mlp();                        // net1 50 -> 32, relu, net2 32 -> 8, sigmoid
MLPConfig four_linears(int64_t width = 2000);  // fc1 to fc4, no activations

// A chain of Linear layers.
struct MLPImpl : torch::nn::Cloneable<MLPImpl> {
  explicit MLPImpl(MLPConfig config);
  void reset() override;
  void reset_parameters();  // as in Linear: uniform in +-1 / sqrt(in), weight before bias
  at::Tensor forward(at::Tensor x);

  // The configuration, and the submodules under their names.
  MLPConfig config;
  std::vector<nn::Linear> layers;  // registered with the names of the config
};
TESSERA_MODULE(MLP);  // the holder of MLPImpl

// PyTorch's MLPStacked: n_layers equal MLPs in sequence, with parameter names layers.0.net1.weight, ...
struct MLPStackedImpl : torch::nn::Cloneable<MLPStackedImpl> {
  explicit MLPStackedImpl(int64_t n_layers = 2, MLPConfig config = mlp_module());
  void reset() override;
  at::Tensor forward(at::Tensor x);

  // The configuration, and the submodules under their names.
  int64_t n_layers;
  MLPConfig config;
  nn::ModuleList<MLP> layers{nullptr};
};
TESSERA_MODULE(MLPStacked);  // the holder of MLPStackedImpl

}  // namespace tessera::models
