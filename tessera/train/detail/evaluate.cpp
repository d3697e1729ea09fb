#include "tessera/train/detail/evaluate.h"

#include "tessera/data/dataset.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/models/loss.h"
#include "tessera/tensor_parallel/loss_parallel.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/constant_pad_nd.h>
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
  const auto context = model.context_scope();
  const auto mine = [&](const at::Tensor& x) { return context ? context->shard(x, 1) : x; };
  for (int64_t first = 0; first < samples; first += batch) {
    const auto rows = sampler.next().rows_of(model.data_rank(), model.data_ranks());
    const auto read = data::read_batch(dataset, rows);
    const auto target = mine(read.target.to(device));
    const auto output = model.logits(mine(read.input.to(device)));
    if (!output.defined()) continue;  // another stage has them
    const auto logits = full_tensor_or_self(output);
    const auto counted = target.ne(data::kIgnored);
    auto wrong = logits.argmax(-1).ne(target).logical_and(counted).sum(1), all = counted.sum(1);
    if (context) {  // a rank has a part of each sample
      const auto group = model.mesh().get_group("cp");
      for (auto* values : {&wrong, &all}) group->all_reduce(*values, ReduceOp::Sum).wait();
    }
    sums[0] += models::loss_sum(logits, target).to(at::kDouble);
    if (!context || model.mesh().get_local_rank("cp") == 0)
      sums[1] += wrong.eq(0).logical_and(all.gt(0)).sum().to(at::kDouble);
  }
  model.sum_over_data(sums);
  model.sum_over_stages(sums);
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
  const auto context = model.context_scope();
  // Over cp, sequences are padded: causal attention does not see the padding.
  const int64_t parts = context ? 2 * model.mesh().size("cp") : 1;
  for (int64_t i = 0; i < options.tokens; i++) {
    const auto seen = std::min(static_cast<int64_t>(tokens.size()), options.context);
    const auto last = at::tensor(at::IntArrayRef(tokens).slice(tokens.size() - static_cast<size_t>(seen)), at::kLong);
    auto input = last.view({1, -1}).to(device);
    input = at::constant_pad_nd(input, {0, (parts - seen % parts) % parts});
    auto next = at::zeros({1}, input.options());
    if (const auto output = model.logits(context ? context->shard(input, 1) : input); output.defined()) {
      const auto logits = full_tensor_or_self(output);
      next.fill_(sample((context ? context->unshard(logits, 1) : logits)[0][seen - 1]));
    }
    model.sum_over_stages(next);
    tokens.push_back(next.item<int64_t>());
  }
  return tokens;
}

}  // namespace tessera::train
