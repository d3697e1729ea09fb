#include "tessera/train/detail/network.h"

namespace tessera::train {
namespace {

models::GPT2 make(const models::GPT2Config& config) { return models::GPT2(config); }
models::Llama make(const models::LlamaConfig& config) { return models::Llama(config); }
auto& blocks(models::GPT2Impl& model) { return model.h; }
auto& blocks(models::LlamaImpl& model) { return model.layers; }

struct Shape {
  int64_t layers, width, looked_up;  // looked_up: parameters that are only looked up in, and multiply nothing
};
Shape shape_of(const models::GPT2Config& c) { return {c.n_layer, c.n_embd, c.max_seq_len * c.n_embd}; }
Shape shape_of(const models::LlamaConfig& c) { return {c.n_layers, c.dim, c.tied ? 0 : c.vocab_size * c.dim}; }

}  // namespace

Network make_network(const models::Config& config) {
  return std::visit([](const auto& c) -> Network { return make(c); }, config);
}

torch::nn::Module& module_of(const Network& network) {
  return std::visit([](const auto& holder) -> torch::nn::Module& { return *holder.ptr(); }, network);
}

std::vector<std::shared_ptr<torch::nn::Module>> blocks_of(const Network& network) {
  std::vector<std::shared_ptr<torch::nn::Module>> all;
  std::visit(
      [&](const auto& holder) {
        for (auto& block : blocks(*holder.ptr())) all.push_back(block.ptr());
      },
      network);
  return all;
}

at::Tensor logits_of(Network& network, const at::Tensor& tokens) {
  return std::visit([&](auto& holder) { return holder(tokens); }, network);
}

double flops_per_token(const models::Config& config, int64_t length) {
  const auto shape = std::visit([](const auto& c) { return shape_of(c); }, config);
  const auto multiplied = static_cast<double>(models::parameter_count(config) - shape.looked_up);
  return 6 * multiplied + 12 * static_cast<double>(shape.layers * shape.width * length);
}

}  // namespace tessera::train
