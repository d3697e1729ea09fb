#include "model_request.h"
#include "run_python.h"

#include "tessera/models/loss.h"
#include "tessera/state/state_dict.h"
#include "tessera/testing/assert_close.h"
#include "tests/fixtures/transformers.h"

#include <torch/torch.h>

namespace tessera::models {
namespace {

using parity::Message;
using parity::Response;
using testing::close;

const GPT2Config kModelsGPT2{.vocab_size = 29, .max_seq_len = 16, .n_layer = 2, .n_head = 3, .n_embd = 24};
const LlamaConfig kModelsLlama{.vocab_size = 29,
                               .max_seq_len = 16,
                               .n_layers = 2,
                               .n_heads = 6,
                               .n_kv_heads = 2,
                               .dim = 24,
                               .ffn_dim = 40,
                               .rope_theta = 100};

GPT2Config without_bias(GPT2Config c) {
  c.bias = false;
  return c;
}
LlamaConfig tied(LlamaConfig c) {
  c.tied = true;
  c.n_kv_heads = c.n_heads;
  return c;
}

// Adds one case to the request, and our results to `ours`.
template <class Model, class Config>
void add_case(const std::string& name, const Config& config, Message& request, Message& ours) {
  torch::manual_seed(17);
  Model model(config);
  fixtures::fill_uniform(*model, 0.4);
  const auto [tokens, targets] = fixtures::random_tokens(3, 11, config.vocab_size);
  add_model(request, name, model, tokens, targets);

  const auto logits = model(tokens);
  const auto value = loss(logits, targets);
  value.backward();
  ours.tensors[name + "/logits"] = logits.detach();
  ours.tensors[name + "/loss"] = value.detach();
  for (const auto& item : model->named_parameters()) ours.tensors[name + "/grads/" + item.key()] = item.value().grad();
  for (const auto& key : state_dict(*model).names()) ours.texts[name] += (ours.texts[name].empty() ? "" : " ") + key;
}

// Logits, loss, every gradient, and the order of names are equal.
TEST(ModelsParity, SameAsPyTorch) {
  Message request, ours;
  add_case<GPT2>("gpt2", kModelsGPT2, request, ours);
  add_case<GPT2>("gpt2 without bias", without_bias(kModelsGPT2), request, ours);
  add_case<Llama>("llama", kModelsLlama, request, ours);
  add_case<Llama>("llama tied", tied(kModelsLlama), request, ours);
  const Response response = parity::run_python("models.py", request);
  SKIP_WITHOUT_PYTHON(response);
  EXPECT_EQ(response.texts, ours.texts);
  ASSERT_EQ(response.tensors.size(), ours.tensors.size());
  for (const auto& [name, t] : ours.tensors) EXPECT_EQ(close(t, response.tensors.at(name), {1e-5, 1e-5}), "") << name;
}

}  // namespace
}  // namespace tessera::models
