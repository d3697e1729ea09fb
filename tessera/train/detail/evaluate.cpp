#include "tessera/train/detail/evaluate.h"

#include "tessera/data/batch.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/multinomial.h>
#include <ATen/ops/softmax.h>
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

std::vector<int64_t> generate(Layout& layout, std::vector<int64_t> tokens, const Sampling& how, at::Device device) {
  const Looking looking(layout.module());
  auto random = at::detail::createCPUGenerator(how.seed);
  const auto draw = [&](const at::Tensor& logits) {
    if (how.temperature == 0) return logits.argmax().item<int64_t>();
    const auto chances = at::softmax(logits.to(at::kCPU, at::kDouble) / how.temperature, -1);
    return at::multinomial(chances, 1, false, random).item<int64_t>();
  };
  for (int64_t i = 0; i < how.count; i++) {
    const auto seen = std::min(static_cast<int64_t>(tokens.size()), how.longest);
    const auto last = at::tensor(at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(seen)), at::kLong);
    const auto logits = whole(logits_of(layout.network(), last.view({1, -1}).to(device)));
    tokens.push_back(draw(logits[0][-1]));
  }
  return tokens;
}

}  // namespace tessera::train
