#include "tessera/train/detail/evaluate.h"

#include "tessera/data/dataset.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
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

using tessera::detail::full_tensor_or_self;

// Evaluation mode: no gradients and no dropout.
struct EvalScope {
  explicit EvalScope(torch::nn::Module& module) : module(module) { module.eval(); }
  ~EvalScope() { module.train(); }
  EvalScope(const EvalScope&) = delete;
  torch::nn::Module& module;
  at::NoGradGuard no_grad;
};

}  // namespace

EvalMetrics evaluate(ParallelModel& model, const data::Dataset& dataset, int64_t samples, int64_t batch,
                     at::Device device) {
  const EvalScope eval(model.module());
  if (dataset.samples() != data::kEndless) samples = std::min(samples, dataset.samples());
  data::Sampler sampler({.samples = samples, .batch = batch, .shuffle = false, .last = data::LastBatch::Pad});
  auto sums = at::zeros({2}, at::TensorOptions(at::kDouble).device(device));  // loss, exact matches
  for (int64_t first = 0; first < samples; first += batch) {
    const auto rows = sampler.next().rows_of(model.data_rank(), model.data_ranks());
    const auto read = data::read_batch(dataset, rows);
    const auto target = read.target.to(device);
    const auto logits = full_tensor_or_self(logits_of(model.language_model(), read.input.to(device)));
    const auto counted = target.ne(data::kIgnored);
    const auto correct = logits.argmax(-1).eq(target).logical_or(counted.logical_not());
    const auto matches = correct.all(1).logical_and(counted.any(1));
    sums[0] += models::loss_sum(logits, target).to(at::kDouble);
    sums[1] += matches.sum().to(at::kDouble);
  }
  model.sum_over_data(sums);
  const auto n = static_cast<double>(samples);
  return {.loss = sums[0].item<double>() / (n * static_cast<double>(dataset.counted())),
          .accuracy = sums[1].item<double>() / n,
          .samples = samples,
          .kind = eval_kind(dataset)};
}

EvalKind eval_kind(const data::Dataset& dataset) {
  if (dataset.counted() < dataset.length()) return EvalKind::Answers;
  return dataset.has_byte_tokens() ? EvalKind::Bytes : EvalKind::Tokens;
}

std::vector<int64_t> generate(ParallelModel& model, std::vector<int64_t> tokens, const GenerateOptions& options,
                              at::Device device) {
  const EvalScope eval(model.module());
  auto generator = at::detail::createCPUGenerator(options.seed);
  const auto sample = [&](const at::Tensor& logits) {
    if (options.temperature == 0) return logits.argmax().item<int64_t>();
    const auto probabilities = at::softmax(logits.to(at::kCPU, at::kDouble) / options.temperature, -1);
    return at::multinomial(probabilities, 1, false, generator).item<int64_t>();
  };
  for (int64_t i = 0; i < options.tokens; i++) {
    const auto seen = std::min(static_cast<int64_t>(tokens.size()), options.context);
    const auto last = at::tensor(at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(seen)), at::kLong);
    const auto logits = full_tensor_or_self(logits_of(model.language_model(), last.view({1, -1}).to(device)));
    tokens.push_back(sample(logits[0][-1]));
  }
  return tokens;
}

}  // namespace tessera::train
