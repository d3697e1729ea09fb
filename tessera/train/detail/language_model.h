#pragma once
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/sizes.h"

#include <memory>
#include <variant>
#include <vector>

namespace tessera::train {

// One of the models that can be trained. A module holder; copies share the module.
using LanguageModel = std::variant<models::GPT2, models::Llama>;

LanguageModel make_language_model(const models::Config& config);
torch::nn::Module& module_of(const LanguageModel& model);
// The transformer blocks in order: units of fully_shard() and of activation checkpointing.
std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const LanguageModel& model);
at::Tensor logits_of(LanguageModel& model, const at::Tensor& tokens);  // (B, T) -> (B, T, vocab)

// FLOPs of forward and backward per token, as llm.c counts them: 6 per parameter of a matrix product, plus
// causal attention. 799 million for GPT-2 124M at length 1024.
double flops_per_token(const models::Config& config, int64_t length);

}  // namespace tessera::train
