#pragma once
#include "tessera/nn/holder.h"

namespace tessera::models {

// An output layer that multiplies by the embedding's weight. It is a module so that it can be planned and hooked, and
// it is handed the weight at each call instead of registering it a second time: parameters() would list it twice, and
// LibTorch's optimizers would step it twice.
struct TiedHeadImpl : torch::nn::Cloneable<TiedHeadImpl> {
  void reset() override {}
  at::Tensor forward(const at::Tensor& x, const at::Tensor& weight);
};
TESSERA_MODULE(TiedHead);

}  // namespace tessera::models
