#pragma once
#include "tessera/models/detail/model_config.h"
#include "tessera/tensor_parallel/plan.h"

#include <string>
#include <variant>
#include <vector>

// Named model sizes, and the plans of the models.
namespace tessera::models {

// The configuration of any model.
using Config = std::variant<GPT2Config, LlamaConfig>;

// A model that can be selected by name, such as "gpt2-124m".
struct Size {
  const char* name;
  Config config;
};

// All named models.
const std::vector<Size>& all_sizes();

// The configuration with this name. Throws UsageError with similar names for an unknown name.
// Example:  GPT2 model(std::get<GPT2Config>(find_config("gpt2-124m")));
const Config& find_config(const std::string& name);

// The number of parameters.
int64_t parameter_count(const Config& config);

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
