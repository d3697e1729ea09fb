#pragma once
#include "tessera/nn/detail/module_list.h"
#include "tessera/nn/modules.h"

#include <optional>
#include <string>
#include <vector>

// Small chains of linear layers: what PyTorch's tests of parallel training are written with. One class; the models are
// rows.
namespace tessera::models {

enum class Activation { None, Relu, Sigmoid };

struct MLPLayer {
  std::string name;
  int64_t in, out;
  Activation then = Activation::None;
  bool operator==(const MLPLayer&) const = default;
};

struct MLPConfig {
  std::vector<MLPLayer> layers;
  bool bias = true;
  // Weights are drawn from a generator of the module's own with this seed: equal on all ranks, in threads as well.
  // None: from the default one.
  std::optional<uint64_t> seed = {};
  bool operator==(const MLPConfig&) const = default;
};

MLPConfig mlp_module(bool bias = true);        // net1 10 -> 16, relu, net2 16 -> 10; seed 5
MLPConfig simple_model();                      // net1 5 -> 8, relu, net2 8 -> 4, net3 4 -> 12
MLPConfig simple_mlp();                        // net1 50 -> 32, relu, net2 32 -> 8, sigmoid
MLPConfig four_linears(int64_t width = 2000);  // fc1 to fc4, nothing between

struct MLPImpl : torch::nn::Cloneable<MLPImpl> {
  explicit MLPImpl(MLPConfig config);
  void reset() override;
  void reset_parameters();  // as Linear does: uniform in 1 / sqrt(in), weight before bias
  at::Tensor forward(at::Tensor x);

  MLPConfig config;
  std::vector<nn::Linear> layers;  // registered under their names
};
TESSERA_MODULE(MLP);

// `layers`, a list of equal MLPs one behind the other: layers.0.net1.weight, ...
struct MLPStackedImpl : torch::nn::Cloneable<MLPStackedImpl> {
  explicit MLPStackedImpl(int64_t n_layers = 2, MLPConfig config = mlp_module());
  void reset() override;
  at::Tensor forward(at::Tensor x);

  int64_t n_layers;
  MLPConfig config;
  nn::ModuleList<MLP> layers{nullptr};
};
TESSERA_MODULE(MLPStacked);

}  // namespace tessera::models
