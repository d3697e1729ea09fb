#pragma once
#include <torch/nn/modules/linear.h>

#include <ATen/ops/relu.h>

// The MLP of the benchmarks, with LibTorch's modules. benchmarks/peers/tp.py has it in Python.
namespace tessera::bench {

struct PeerMlp : torch::nn::Module {
  PeerMlp() { register_module("net1", net1), register_module("net2", net2); }
  at::Tensor forward(const at::Tensor& x) { return net2(at::relu(net1(x))); }
  torch::nn::Linear net1{10, 16}, net2{16, 10};
};

}  // namespace tessera::bench
