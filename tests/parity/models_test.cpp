#include "ask_python.h"
#include "model_settings.h"

#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/state/state_dict.h"
#include "tessera/testing/assert_close.h"

#include <torch/torch.h>

namespace tessera::models {
namespace {

using parity::Answer;
using parity::Message;
using testing::close;

const GPT2Config kGpt{.vocab_size = 29, .max_seq_len = 16, .n_layer = 2, .n_head = 3, .n_embd = 24};
const LlamaConfig kLlama{.vocab_size = 29,
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

// Adds one case to the question, and what we say to it.
template <class Model, class Config>
void add_case(const std::string& name, const Config& config, Message& question, Message& ours) {
  torch::manual_seed(17);
  Model model(config);
  for (auto& p : model->parameters()) {  // larger than at the start of training, or most of the model would not show
    torch::NoGradGuard no_grad;
    p.uniform_(-0.4, 0.4);
  }
  const auto tokens = torch::randint(config.vocab_size, {3, 11}, torch::kLong);
  const auto targets = torch::randint(config.vocab_size, {3, 11}, torch::kLong);
  question.texts[name] = settings(config);
  question.tensors[name + "/tokens"] = tokens;
  question.tensors[name + "/targets"] = targets;
  const auto dict = state_dict(*model);
  for (const auto& [key, t] : dict) question.tensors[name + "/weights/" + key] = t;

  const auto logits = model(tokens);
  const auto value = loss(logits, targets);
  value.backward();
  ours.tensors[name + "/logits"] = logits.detach();
  ours.tensors[name + "/loss"] = value.detach();
  for (const auto& item : model->named_parameters()) ours.tensors[name + "/grads/" + item.key()] = item.value().grad();
  for (const auto& key : dict.names()) ours.texts[name] += (ours.texts[name].empty() ? "" : " ") + key;
}

// Logits, loss, every gradient, and the order of names.
TEST(ModelsParity, SameAsPyTorch) {
  Message question, ours;
  add_case<GPT2>("gpt2", kGpt, question, ours);
  add_case<GPT2>("gpt2 without bias", without_bias(kGpt), question, ours);
  add_case<Llama>("llama", kLlama, question, ours);
  add_case<Llama>("llama tied", tied(kLlama), question, ours);
  const Answer answer = parity::ask_python("models.py", question);
  SKIP_UNLESS_ANSWERED(answer);
  EXPECT_EQ(answer.texts, ours.texts);
  ASSERT_EQ(answer.tensors.size(), ours.tensors.size());
  for (const auto& [name, t] : ours.tensors) EXPECT_EQ(close(t, answer.tensors.at(name), {1e-5, 1e-5}), "") << name;
}

}  // namespace
}  // namespace tessera::models
