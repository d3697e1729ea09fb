#include "tessera/train/detail/router.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace tessera::train {

std::optional<RouterMetrics> router_metrics(ParallelModel& model, bool update) {
  auto* llama = std::get_if<models::Llama>(&model.language_model());
  if (!llama || (*llama)->config.moe.n_experts == 0) return std::nullopt;
  const auto& config = (*llama)->config;
  const int64_t experts = config.moe.n_experts;
  const auto local = model.experts();
  // Per layer: choices of each expert, dropped choices, auxiliary loss.
  auto sums = at::zeros({config.n_layers, experts + 2}, at::kDouble);
  for (const auto& [layer, moe] : local) {
    const auto statistics = moe->statistics();
    sums[layer].narrow(0, 0, experts).copy_(at::tensor(statistics.tokens_per_expert));
    sums[layer][experts] = statistics.dropped;
    sums[layer][experts + 1] = statistics.aux_loss;
  }
  sums = sums.to(model.parameters()[0].tensor.device());
  model.sum_over_data(sums);
  model.sum_over_stages(sums);
  sums = sums.cpu();
  const auto choices = sums.narrow(1, 0, experts);
  for (auto [layer, moe] : local) moe->update_bias(update ? choices[layer] : at::zeros_like(choices[layer]));
  const double all = choices.sum().item<double>(), loss_ranks = static_cast<double>(model.loss_ranks());
  return RouterMetrics{
      .aux_loss = sums.select(1, experts + 1).mean().item<double>() / loss_ranks,
      .dropped = all > 0 ? sums.select(1, experts).sum().item<double>() / all : 0,
      .max_load = all > 0 ? (choices.amax(1) / choices.mean(1)).max().item<double>() : 0,
  };
}

}  // namespace tessera::train
