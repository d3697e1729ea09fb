#pragma once
#include "tessera/models/sizes.h"
#include "tessera/tensor_parallel/plan.h"

namespace tessera::models {

struct PlanOptions {
  bool sequence_parallel = false;  // between attention and feed-forward, activations are cut along the sequence
  bool loss_parallel = false;      // logits stay cut along the vocabulary, for LossParallel; else they are gathered
};

// How the models here are cut over a "tp" axis. Attention by heads, feed-forward by hidden features, embedding and
// output by vocabulary. Print them to see: they are written as text.
// Example:  parallelize_module(model, mesh["tp"], tensor_parallel_plan(config, {.sequence_parallel = true}));
Plan tensor_parallel_plan(const GPT2Config& config, const PlanOptions& options = {});
Plan tensor_parallel_plan(const LlamaConfig& config, const PlanOptions& options = {});
Plan tensor_parallel_plan(const Config& config, const PlanOptions& options = {});

}  // namespace tessera::models
