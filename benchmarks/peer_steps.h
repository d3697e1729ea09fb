#pragma once
#include "benchmarks/train_step.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>
#include <ATen/ops/randn.h>

// Train steps of the data-parallel benchmarks. Each rank has its own batch.
namespace tessera::bench {

template <class Model>
Step mlp_step(Model model, Optimizer optimizer, int64_t rank) {
  const auto x = at::randn({8, 10}, generator(static_cast<uint64_t>(rank)));
  return train_step(optimizer, model->parameters(), [=]() mutable { return model->forward(x).sum(); });
}

template <class Model>
Step gpt_step(Model model, Optimizer optimizer, int64_t rank) {
  const auto tokens = at::randint(256, {4, 129}, generator(static_cast<uint64_t>(rank)), at::kLong);
  const auto in = tokens.narrow(1, 0, 128).contiguous(), target = tokens.narrow(1, 1, 128).flatten();
  return train_step(optimizer, model->parameters(),
                    [=]() mutable { return at::cross_entropy_loss(model->forward(in).flatten(0, 1), target); });
}

}  // namespace tessera::bench
