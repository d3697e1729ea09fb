#pragma once
#include "tessera/models/detail/model_config.h"
#include "tessera/models/sizes.h"
#include "tessera/tensor_parallel/plan.h"

namespace tessera::models {

// Options of tensor_parallel_plan.
struct PlanOptions {
  bool sequence_parallel = false;  // shard activations along the sequence between attention and feed-forward
  bool loss_parallel = false;      // keep logits sharded along the vocabulary, for LossParallel; false: all-gather them
};

// The tensor-parallel plans of the models. Attention is sharded by heads, feed-forward by hidden features, embedding
// and output by vocabulary. Print a plan to see its text.
// Example:  parallelize_module(model, mesh["tp"], tensor_parallel_plan(config, {.sequence_parallel = true}));
Plan tensor_parallel_plan(const GPT2Config& config, const PlanOptions& options = {});
Plan tensor_parallel_plan(const LlamaConfig& config, const PlanOptions& options = {});
Plan tensor_parallel_plan(const Config& config, const PlanOptions& options = {});

}  // namespace tessera::models
