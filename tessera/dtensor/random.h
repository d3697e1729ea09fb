#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>

// Random numbers by counter: element i of the n-th fill is philox(seed, n, i), where i is its place in the global tensor.
// So a tensor gets the same bits on 1, 2, 4 or 8 ranks, however it is cut, and so does a plain one filled here.
// In-place random ops, *_like and dropout on distributed tensors (and so torch::nn::init and torch::nn::Dropout) draw from
// here; stock torch::nn constructors, which fill plain tensors, keep LibTorch's own stream.
namespace tessera {

// Seeds this rank's stream: the same seed on every rank, or replicas will differ. Also resets the count of fills.
void manual_seed(uint64_t seed);

namespace random {

at::Tensor& uniform_(at::Tensor& t, double from = 0, double to = 1);
at::Tensor& normal_(at::Tensor& t, double mean = 0, double std = 1);
at::Tensor& bernoulli_(at::Tensor& t, double p = 0.5);
at::Tensor rand(at::IntArrayRef size, at::TensorOptions options = {});
at::Tensor randn(at::IntArrayRef size, at::TensorOptions options = {});
at::Tensor dropout(const at::Tensor& t, double p, bool train);

}  // namespace random
}  // namespace tessera
