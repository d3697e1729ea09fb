// Transformers trained with our parallelize_module and with PyTorch's, from the same weights and with the same plan.
#include "model_request.h"
#include "run_python.h"

#include "tessera/base/detail/libtorch_compat.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/full_tensor.h"
#include "tests/fixtures/transformers.h"

#include <torch/torch.h>

#include <map>
#include <optional>

namespace tessera::models {
namespace {

using parity::Message;
using parity::Response;
using testing::close;
using testing::Rank;
using testing::run_ranks;

// Sequences and vocabularies that do not divide by the number of ranks. PyTorch requires that hidden features divide,
// and that every rank has rows of the embedding. Before 2.13 it also requires that the sequence divides: an uneven
// all-gather along dim 1 returned a local tensor that is not contiguous, and the Linear after it threw ("view size is
// not compatible with input tensor's size and stride"). GPT-2 has one layer and Llama few steps on several
// ranks, because with more processes than cores each collective of PyTorch takes milliseconds.
constexpr int64_t kTokens = libtorch::kAtLeast213 ? 7 : 8;

GPT2Config parallel_gpt2() {
  auto config = fixtures::kTinyGPT2FourHeads;
  config.max_seq_len = 10;
  config.n_layer = 1;
  return config;
}
LlamaConfig parallel_llama() {
  auto config = fixtures::kTinyLlama;
  config.vocab_size = 11;
  config.n_heads = 8;
  config.n_kv_heads = 4;
  config.dim = 32;
  config.ffn_dim = 40;
  return config;
}

template <class Model>
struct ParallelCase {
  std::string name;
  std::map<int64_t, int> steps;  // by number of ranks
  Model model;
  at::Tensor tokens, targets;

  template <class Config>
  ParallelCase(std::string case_name, const Config& config, std::map<int64_t, int> by_ranks, Message& request)
      : name(std::move(case_name)), steps(std::move(by_ranks)), model(config) {
    fixtures::fill_uniform(*model);
    const auto batch = fixtures::random_tokens(2, kTokens, config.vocab_size);
    tokens = batch.tokens;
    targets = batch.targets;
    add_model(request, name, model, tokens, targets);
    for (const auto& [n, count] : steps) request.texts[c10::str(name, "/steps/", n)] = std::to_string(count);
  }
};

using Counts = std::map<std::string, int64_t>;  // {"all_reduce", 5}
struct Trained {
  at::Tensor losses;
  std::map<std::string, at::Tensor> grads;  // of the first step
  Counts forward, backward, optimizer;      // of the first step
};

Counts counted(CommDebugMode& mode) {
  Counts counts;
  for (const auto& [name, count] : mode.get_comm_counts().by_name()) counts[name.substr(name.rfind('.') + 1)] = count;
  mode.reset();
  return counts;
}
// The same as train() in tensor_parallel.py.
template <class Model>
Trained train(Model& model, const ParallelCase<Model>& on, int steps) {
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
        trained.grads[item.key()] = fixtures::full_tensor(item.value().grad()).clone();
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
void compare(const ParallelCase<Model>& on, int64_t n, bool sequence, const Response& response) {
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
    EXPECT_EQ(close(ours.losses, response.tensors.at(key + "losses"), {0, 1e-5}), "");
    EXPECT_EQ(ours.grads.size(), on.model->parameters().size());
    for (const auto& [name, grad] : ours.grads)
      EXPECT_EQ(close(grad, response.tensors.at(key + "grads/" + name), {1e-5, 1e-6}), "") << name;
  }
  const auto no_more = [&](const Counts& ours, const std::string& part) {
    Counts theirs;
    read_counts(response.texts.at(key + part), [&](const std::string& kind, int64_t count) { theirs[kind] = count; });
    for (const auto& [kind, count] : ours) EXPECT_LE(count, theirs[kind]) << kind << " in " << part;
    // PyTorch's collectives were counted.
    EXPECT_EQ(theirs.empty(), n == 1 || (part == "optimizer" && !sequence)) << part;
  };
  no_more(each[0].forward, "forward");
  no_more(each[0].backward, "backward");
  no_more(each[0].optimizer, "optimizer");
}

TEST(TensorParallelParity, TrainsLikePyTorch) {
  torch::manual_seed(7);
  Message request;
  const ParallelCase<GPT2> gpt("gpt2", parallel_gpt2(), {{1, 20}, {2, 20}, {4, 20}}, request);
  const ParallelCase<Llama> llama("llama", parallel_llama(), {{1, 20}, {2, 5}, {4, 1}}, request);
  const Response response = parity::run_python("tensor_parallel.py", request);
  SKIP_WITHOUT_PYTHON(response);
  for (const int64_t n : {1, 2, 4})
    for (const bool sequence : {false, true}) {
      if (n == 1 && sequence) continue;  // not parallel
      compare(gpt, n, sequence, response);
      compare(llama, n, sequence, response);
    }
}

}  // namespace
}  // namespace tessera::models
