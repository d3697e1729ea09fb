#include "tessera/train/detail/language_model.h"

namespace tessera::train {
namespace {

models::GPT2 make(const models::GPT2Config& config) { return models::GPT2(config); }
models::Llama make(const models::LlamaConfig& config) { return models::Llama(config); }
auto& blocks(models::GPT2Impl& model) { return model.h; }
auto& blocks(models::LlamaImpl& model) { return model.layers; }

struct FlopSizes {
  int64_t layers, dim;
  int64_t unused;  // parameters that take part in no matrix product of a token: embeddings, experts not chosen
};
FlopSizes flop_sizes(const models::GPT2Config& c) { return {c.n_layer, c.n_embd, c.max_seq_len * c.n_embd}; }
FlopSizes flop_sizes(const models::LlamaConfig& c) {
  const int64_t experts =
      c.moe.n_experts > 0 ? c.n_layers * (c.moe.n_experts - c.moe.top_k) * 3 * c.dim * c.ffn_dim : 0;
  return {c.n_layers, c.dim, (c.tied ? 0 : c.vocab_size * c.dim) + experts};
}

}  // namespace

LanguageModel make_language_model(const models::Config& config) {
  return std::visit([](const auto& c) -> LanguageModel { return make(c); }, config);
}

torch::nn::Module& module_of(const LanguageModel& model) {
  return std::visit([](const auto& holder) -> torch::nn::Module& { return *holder.ptr(); }, model);
}

std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const LanguageModel& model) {
  std::vector<std::shared_ptr<torch::nn::Module>> all;
  std::visit(
      [&](const auto& holder) {
        for (auto& block : blocks(*holder.ptr())) all.push_back(block.ptr());
      },
      model);
  return all;
}

at::Tensor logits_of(LanguageModel& model, const at::Tensor& tokens) {
  return std::visit([&](auto& holder) { return holder(tokens); }, model);
}

double flops_per_token(const models::Config& config, int64_t length) {
  const auto sizes = std::visit([](const auto& c) { return flop_sizes(c); }, config);
  const auto multiplied = static_cast<double>(models::parameter_count(config) - sizes.unused);
  return 6 * multiplied + 6 * static_cast<double>(sizes.layers * sizes.dim * length);
}

}  // namespace tessera::train
