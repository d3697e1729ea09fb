// A transformer trained 20 steps by our parallelize_module and by PyTorch's, from the same weights, by the same plan.
#include "ask_python.h"
#include "model_settings.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/plans.h"
#include "tessera/state/state_dict.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"

#include <torch/torch.h>

#include <map>
#include <optional>
#include <sstream>

namespace tessera::models {
namespace {

using parity::Answer;
using parity::Message;
using testing::close;
using testing::Rank;
using testing::run_ranks;

// Sequences of 7 and vocabularies that do not divide by the ranks. PyTorch can do no more: hidden features must divide,
// and no rank may be without rows of an embedding. One layer of GPT-2, and few steps of Llama on several ranks: with
// more processes than cores, each collective takes PyTorch milliseconds.
const GPT2Config kGpt{.vocab_size = 13, .max_seq_len = 10, .n_layer = 1, .n_head = 4, .n_embd = 16};
const LlamaConfig kLlama{.vocab_size = 11,
                         .max_seq_len = 9,
                         .n_layers = 2,
                         .n_heads = 8,
                         .n_kv_heads = 4,
                         .dim = 32,
                         .ffn_dim = 40,
                         .rope_theta = 100};

template <class Model>
struct Case {
  std::string name;
  std::map<int64_t, int> steps;  // by number of ranks
  Model model;
  at::Tensor tokens, targets;

  template <class Config>
  Case(std::string case_name, const Config& config, std::map<int64_t, int> by_ranks, Message& question)
      : name(std::move(case_name)), steps(std::move(by_ranks)), model(config) {
    {
      torch::NoGradGuard no_grad;
      for (auto& p : model->parameters()) p.uniform_(-0.3, 0.3);
    }
    tokens = torch::randint(config.vocab_size, {2, 7}, torch::kLong);
    targets = torch::randint(config.vocab_size, {2, 7}, torch::kLong);
    question.texts[name] = settings(config);
    for (const auto& [n, count] : steps) question.texts[c10::str(name, "/steps/", n)] = std::to_string(count);
    question.tensors[name + "/tokens"] = tokens;
    question.tensors[name + "/targets"] = targets;
    for (const auto& [key, t] : state_dict(*model)) question.tensors[name + "/weights/" + key] = t.clone();
  }
};

using Counts = std::map<std::string, int64_t>;  // {"all_reduce", 5}
struct Trained {
  at::Tensor losses;
  std::map<std::string, at::Tensor> grads;  // of the first step, whole
  Counts forward, backward, optimizer;      // of the first step
};

Counts counted(CommDebugMode& mode) {
  Counts counts;
  for (const auto& [name, count] : mode.get_comm_counts().by_name()) counts[name.substr(name.rfind('.') + 1)] = count;
  mode.reset();
  return counts;
}
Counts read_counts(const std::string& text) {  // "all_reduce=5 all_gather_into_tensor=1"
  Counts counts;
  std::istringstream in(text);
  for (std::string word; in >> word;)
    counts[word.substr(0, word.find('='))] = std::stoll(word.substr(word.find('=') + 1));
  return counts;
}

// As tensor_parallel.py trains.
template <class Model>
Trained train(Model& model, const Case<Model>& on, int steps) {
  Trained trained;
  std::vector<at::Tensor> losses;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01).eps(1e-5).weight_decay(0.01));
  for (int step = 0; step < steps; step++) {
    optimizer.zero_grad();
    std::optional<CommDebugMode> mode;
    if (step == 0) mode.emplace();
    const auto value = loss(model(on.tokens), on.targets);
    if (mode) trained.forward = counted(*mode);
    value.backward();
    if (mode) {
      trained.backward = counted(*mode);
      for (const auto& item : model->named_parameters()) {
        const auto grad = item.value().grad();
        trained.grads[item.key()] = (is_dtensor(grad) ? DTensor(grad).full_tensor() : grad).clone();
      }
      mode->reset();
    }
    optimizer.step();
    if (mode) trained.optimizer = counted(*mode);
    losses.push_back(value.detach());
  }
  trained.losses = torch::stack(losses);
  return trained;
}

template <class Model>
void compare(const Case<Model>& on, int64_t n, bool sequence, const Answer& answer) {
  const auto key = c10::str(on.name, "/", n, "/", sequence ? 1 : 0, "/");
  SCOPED_TRACE(key);
  std::vector<Trained> each(n);
  run_ranks(n, [&](Rank& me) {
    auto model = clone(on.model);
    const auto plan = tensor_parallel_plan(model->config, {.sequence_parallel = sequence});
    if (n > 1) parallelize_module(model, me.mesh(c10::str("tp=", n)), plan);
    each[me.rank] = train(model, on, on.steps.at(n));
  });
  for (const auto& ours : each) {
    EXPECT_EQ(close(ours.losses, answer.tensors.at(key + "losses"), {0, 1e-5}), "");
    EXPECT_EQ(ours.grads.size(), on.model->parameters().size());
    for (const auto& [name, grad] : ours.grads)
      EXPECT_EQ(close(grad, answer.tensors.at(key + "grads/" + name), {1e-5, 1e-6}), "") << name;
  }
  const auto no_more = [&](const Counts& ours, const std::string& part) {
    auto theirs = read_counts(answer.texts.at(key + part));
    for (const auto& [kind, count] : ours) EXPECT_LE(count, theirs[kind]) << kind << " in " << part;
    EXPECT_EQ(theirs.empty(), n == 1 || (part == "optimizer" && !sequence)) << part;  // they were counted
  };
  no_more(each[0].forward, "forward");
  no_more(each[0].backward, "backward");
  no_more(each[0].optimizer, "optimizer");
}

TEST(TensorParallelParity, TrainsAsPyTorchDoes) {
  torch::manual_seed(7);
  Message question;
  const Case<GPT2> gpt("gpt2", kGpt, {{1, 20}, {2, 20}, {4, 20}}, question);
  const Case<Llama> llama("llama", kLlama, {{1, 20}, {2, 5}, {4, 1}}, question);
  const Answer answer = parity::ask_python("tensor_parallel.py", question);
  SKIP_UNLESS_ANSWERED(answer);
  for (const int64_t n : {1, 2, 4})
    for (const bool sequence : {false, true}) {
      if (n == 1 && sequence) continue;  // nothing is parallel
      compare(gpt, n, sequence, answer);
      compare(llama, n, sequence, answer);
    }
}

}  // namespace
}  // namespace tessera::models
