#pragma once
#include <tessera/tessera.h>
#include <tessera/train.h>
#include <torch/torch.h>

// What the examples of the API reference and of README use without showing it.
namespace tessera::docs {

struct FeedForwardImpl : torch::nn::Module {
  explicit FeedForwardImpl(int64_t width) : up(width, width), down(width, width) {
    register_module("up", up), register_module("down", down);
  }
  at::Tensor forward(const at::Tensor& x) { return down(torch::relu(up(x))); }
  at::Tensor encode(const at::Tensor& x) { return up(x); }
  nn::Linear up, down;
};
TESSERA_MODULE(FeedForward);

inline const auto train_step = [](auto& model, auto& optimizer, const at::Tensor& x) {
  optimizer.zero_grad();
  auto loss = model(x).pow(2).mean();
  loss.backward();
  optimizer.step();
  return loss;
};

}  // namespace tessera::docs
