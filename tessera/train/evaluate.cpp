#include "tessera/train/evaluate.h"

#include "tessera/data/batch.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace tessera::train {
namespace {

at::Tensor whole(const at::Tensor& t) { return is_dtensor(t) ? DTensor(t).full_tensor() : t; }

// Without gradients and without dropout.
struct Looking {
  explicit Looking(torch::nn::Module& module) : module(module) { module.eval(); }
  ~Looking() { module.train(); }
  Looking(const Looking&) = delete;
  torch::nn::Module& module;
  at::NoGradGuard no_grad;
};

}  // namespace

EvalMetrics evaluate(Layout& layout, const data::Dataset& dataset, int64_t samples, int64_t batch, at::Device device) {
  const Looking looking(layout.module());
  if (dataset.samples() != data::kEndless) samples = std::min(samples, dataset.samples());
  data::Sampler sampler({.samples = samples, .batch = batch, .shuffle = false, .last = data::LastBatch::Pad});
  auto sums = at::zeros({2}, at::TensorOptions(at::kDouble).device(device));  // of losses, and of right answers
  for (int64_t first = 0; first < samples; first += batch) {
    const auto rows = sampler.next().rows_of(layout.data_rank(), layout.data_ranks());
    const auto read = data::read_batch(dataset, rows);
    const auto target = read.target.to(device);
    const auto logits = whole(logits_of(layout.network(), read.input.to(device)));
    const auto counts = target.ne(data::kIgnored);
    const auto right = logits.argmax(-1).eq(target).logical_or(counts.logical_not()).all(1).logical_and(counts.any(1));
    sums[0] += models::loss_sum(logits, target).to(at::kDouble);
    sums[1] += right.sum().to(at::kDouble);
  }
  layout.sum_over_data(sums);
  const auto n = static_cast<double>(samples);
  return {.loss = sums[0].item<double>() / (n * static_cast<double>(dataset.counted())),
          .accuracy = sums[1].item<double>() / n,
          .samples = samples};
}

std::vector<int64_t> generate(Layout& layout, std::vector<int64_t> tokens, int64_t count, int64_t longest,
                              at::Device device) {
  const Looking looking(layout.module());
  for (int64_t i = 0; i < count; i++) {
    const auto seen = std::min(static_cast<int64_t>(tokens.size()), longest);
    const auto last = at::tensor(at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(seen)), at::kLong);
    const auto logits = whole(logits_of(layout.network(), last.view({1, -1}).to(device)));
    tokens.push_back(logits[0][-1].argmax().item<int64_t>());
  }
  return tokens;
}

}  // namespace tessera::train
