#pragma once
#include "tessera/base/visit.h"
#include "tessera/models/mlp.h"
#include "tessera/testing/assert_close.h"

#include <torch/torch.h>

// What the tests of data parallelism share: each rank has a batch of its own, and a plain module tells what the mean of
// the gradients is.
namespace tessera::data_parallel {

inline constexpr testing::Tolerance kExact{0, 0};
inline constexpr double kTinyMb = 300.0 / (1 << 20);  // a bucket of 75 floats: the MLP of the seeds makes two

inline Tensors batches(int64_t ranks, std::vector<int64_t> sizes = {4, 10}, int64_t seed = 7) {
  torch::manual_seed(seed);
  Tensors made;
  for (int64_t r = 0; r < ranks; r++) made.push_back(torch::randn(sizes));
  return made;
}

inline Tensors gradients_of(const torch::nn::Module& module) {
  Tensors gradients;
  for (const auto& p : module.parameters())
    gradients.push_back(p.grad().defined() ? p.grad().detach().clone() : at::Tensor());
  return gradients;
}

inline Tensors values_of(const torch::nn::Module& module) {
  Tensors values;
  for (const auto& p : module.parameters()) values.push_back(p.detach().clone());
  return values;
}

// Adds to .grad of a plain module what data parallelism should: each rank's gradient divided, then summed in order.
// loss(module, batch): one rank's.
template <class H, class Loss>
void accumulate_means(H& module, const Tensors& batches, Loss loss) {
  const auto parameters = module->parameters();
  Tensors before, total(parameters.size());
  for (const auto& p : parameters) before.push_back(p.grad());
  for (const auto& batch : batches) {
    for (size_t i = 0; i < parameters.size(); i++)
      parameters[i].mutable_grad() = before[i].defined() ? before[i].clone() : at::Tensor();
    loss(module, batch).backward();
    for (size_t i = 0; i < parameters.size(); i++) {
      if (!parameters[i].grad().defined()) continue;
      const auto share = parameters[i].grad() * (1.0 / static_cast<double>(batches.size()));
      total[i] = total[i].defined() ? total[i] + share : share;
    }
  }
  for (size_t i = 0; i < parameters.size(); i++) parameters[i].mutable_grad() = total[i];
}

inline at::Tensor square_loss(models::MLP& module, const at::Tensor& batch) { return module(batch).pow(2).mean(); }

}  // namespace tessera::data_parallel
