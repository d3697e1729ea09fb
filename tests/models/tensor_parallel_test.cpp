// The ready plans at work: a model trained 20 steps on 1, 2 and 4 ranks loses what the plain one loses, and sends what
// its plan says, no more. Sequences, vocabularies and hidden features do not divide by the ranks.
#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/plans.h"
#include "tessera/tensor_parallel/loss_parallel.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <vector>

namespace tessera::models {
namespace {

using comm::Kind;
using testing::Rank;
using testing::run_ranks;

constexpr int kLayers = 2;
constexpr double kTolerance = 1e-5;
// Larger than the rounding of a gradient: AdamW divides by a gradient's size, so that one which is 0 but for rounding
// (of a key's bias) would become a whole step in a direction of its own on each number of ranks.
constexpr double kEps = 1e-5;

const GPT2Config kGpt{.vocab_size = 13, .max_seq_len = 9, .n_layer = kLayers, .n_head = 4, .n_embd = 16};
const LlamaConfig kLlama{.vocab_size = 11,
                         .max_seq_len = 9,
                         .n_layers = kLayers,
                         .n_heads = 8,
                         .n_kv_heads = 4,
                         .dim = 32,
                         .ffn_dim = 42,
                         .rope_theta = 100};

// Collectives of one part of a step; there are no others.
struct Comm {
  int64_t all_reduce = 0, all_gather = 0, reduce_scatter = 0, other = 0;
  bool operator==(const Comm&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Comm& c) {
  return out << c.all_reduce << " all_reduce, " << c.all_gather << " all_gather, " << c.reduce_scatter
             << " reduce_scatter, " << c.other << " other";
}
Comm counted(const CommDebugMode& mode) {
  const auto& counts = mode.get_comm_counts();
  Comm c{.all_reduce = counts.of(Kind::AllReduce),
         .all_gather = counts.of(Kind::AllGatherIntoTensor),
         .reduce_scatter = counts.of(Kind::ReduceScatterTensor)};
  c.other = counts.total() - c.all_reduce - c.all_gather - c.reduce_scatter;
  return c;
}

// Of one step; forward includes the loss.
struct StepComm {
  Comm forward, backward, optimizer;
  int64_t implicit = 0;  // redistributions of forward and backward that no style asked for
  bool operator==(const StepComm&) const = default;
};
std::ostream& operator<<(std::ostream& out, const StepComm& c) {
  return out << "\n  forward   " << c.forward << "\n  backward  " << c.backward << "\n  optimizer " << c.optimizer
             << "\n  implicit  " << c.implicit;
}

struct Trained {
  std::vector<double> losses;
  StepComm comm;  // of the last step, when the optimizer's state is there
};

struct Data {
  at::Tensor tokens, targets;
  Data(int64_t vocab, int64_t length) {
    torch::manual_seed(8);
    tokens = torch::randint(vocab, {2, length}, torch::kLong);
    targets = torch::randint(vocab, {2, length}, torch::kLong);
    targets[0][1] = -100;  // does not count
  }
};

template <class Model>
Trained train(Model& model, const Data& data, int steps, bool loss_parallel = false) {
  Trained trained;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01).eps(kEps));
  for (int step = 0; step < steps; step++) {
    std::optional<CommDebugMode> mode;
    auto count = [&](Comm& into) {
      if (!mode) return;
      into = counted(*mode);
      if (&into != &trained.comm.optimizer) trained.comm.implicit += mode->implicit_redistributions();
      mode->reset();
    };
    if (step == steps - 1) mode.emplace();
    optimizer.zero_grad();
    at::Tensor value;
    {
      std::optional<LossParallel> scope;
      if (loss_parallel) scope.emplace();
      value = loss(model(data.tokens), data.targets);
    }
    count(trained.comm.forward);
    value.backward();
    count(trained.comm.backward);
    optimizer.step();
    count(trained.comm.optimizer);
    trained.losses.push_back((is_dtensor(value) ? DTensor(value).full_tensor() : value).template item<double>());
  }
  return trained;
}

void expect_equal(const std::vector<double>& losses, const std::vector<double>& expected) {
  ASSERT_EQ(losses.size(), expected.size());
  for (size_t i = 0; i < losses.size(); i++) ASSERT_NEAR(losses[i], expected[i], kTolerance) << "step " << i;
}

// Weights that make all parts of the model count, as they do not at the start of training.
template <class Model, class Config>
Model made(const Config& config) {
  torch::manual_seed(7);
  Model model(config);
  torch::NoGradGuard no_grad;
  for (auto& p : model->parameters()) p.uniform_(-0.3, 0.3);
  return model;
}

template <class Model>
std::vector<Trained> train_on(int64_t n, const Model& plain, const PlanOptions& options, const Data& data, int steps) {
  std::vector<Trained> each(n);
  run_ranks(n, [&](Rank& me) {
    auto model = clone(plain);
    parallelize_module(model, me.mesh(c10::str("tp=", n)), tensor_parallel_plan(plain->config, options));
    manual_seed(11);
    each[me.rank] = train(model, data, steps, options.loss_parallel);
  });
  return each;
}

template <class Model, class Config>
void expect_trains_alike(const Config& config, const Data& data, int steps, const std::vector<int64_t>& worlds,
                         StepComm (*comm)(int64_t, const PlanOptions&)) {
  const auto plain = made<Model>(config);
  auto alone = clone(plain);
  const auto expected = train(alone, data, steps).losses;
  ASSERT_LT(expected.back(), 0.95 * expected.front());  // it does learn
  for (const int64_t n : worlds)
    for (const bool sequence : {false, true})
      for (const bool loss : {false, true}) {
        const PlanOptions options{.sequence_parallel = sequence, .loss_parallel = loss};
        SCOPED_TRACE(c10::str(n, " ranks", sequence ? ", sequence parallel" : "", loss ? ", loss parallel" : ""));
        const int count = loss ? std::min(steps, 5) : steps;
        for (const auto& trained : train_on(n, plain, options, data, count)) {
          expect_equal(trained.losses, {expected.begin(), expected.begin() + count});
          EXPECT_EQ(trained.comm, comm(n, options));
        }
      }
}

// Without sequence parallelism. Forward: the embedding's rows are summed, so are the outputs of each attention and each
// feed-forward; the logits are gathered, or the loss is computed where they lie. Backward: what a cut matrix reads is
// whole, so that its gradient is a sum: one for attention, one for feed-forward, one for the head.
//
// With it each sum of forward becomes a reduce_scatter, with a gather before the next cut matrix; in backward they swap
// places. What norms learn is then a sum over pieces of the sequence, taken when the optimizer asks for it.
StepComm gpt2_comm(int64_t n, const PlanOptions& options) {
  StepComm step;
  if (options.sequence_parallel) {
    step.forward = {.all_gather = 2 * kLayers + 1, .reduce_scatter = 2 * kLayers + 2};  // wte, wpe
    step.backward = {.all_gather = 2 * kLayers + 2, .reduce_scatter = 2 * kLayers + 1};
    step.optimizer = {.all_reduce = 2 * (2 * kLayers + 1)};  // weight and bias of each norm
  } else {
    step.forward = {.all_reduce = 2 * kLayers + 1};
    step.backward = {.all_reduce = 2 * kLayers + 1};
  }
  if (n == 1) step.optimizer = {};  // a sum of one piece is that piece
  if (options.loss_parallel)
    step.forward.all_reduce += 3;
  else
    step.forward.all_gather += 1;
  return step;
}
StepComm llama_comm(int64_t n, const PlanOptions& options) {
  auto step = gpt2_comm(n, options);
  if (options.sequence_parallel) {  // no wpe, and norms without bias
    step.forward.reduce_scatter -= 1;
    step.backward.all_gather -= 1;
    step.optimizer.all_reduce /= 2;
  }
  return step;
}

TEST(TensorParallelModels, Gpt2) { expect_trains_alike<GPT2>(kGpt, Data(13, 7), 20, {1, 2, 4}, gpt2_comm); }
TEST(TensorParallelModels, Llama) { expect_trains_alike<Llama>(kLlama, Data(11, 6), 20, {1, 2, 4}, llama_comm); }
TEST(TensorParallelModels, TiedLlama) {
  auto config = kLlama;
  config.tied = true;
  expect_trains_alike<Llama>(config, Data(11, 7), 4, {2, 4}, llama_comm);
}

// Over 4 ranks, the last has no position of the sequence and no token of the vocabulary.
TEST(TensorParallelModels, ARankWithNothing) {
  auto gpt = kGpt;
  gpt.vocab_size = 9;
  gpt.bias = false;
  expect_trains_alike<GPT2>(gpt, Data(9, 3), 4, {4}, gpt2_comm);
  auto llama = kLlama;
  llama.vocab_size = 9;
  llama.ffn_dim = 9;
  expect_trains_alike<Llama>(llama, Data(9, 3), 4, {4}, llama_comm);
}

GPT2 made_with_dropout(double elsewhere, double in_attention) {
  auto config = kGpt;
  config.dropout = elsewhere;
  auto model = made<GPT2>(config);
  for (auto& block : model->h) block->attn->config.dropout = in_attention;
  return model;
}

// What a Dropout drops goes by the place in the whole tensor: the same on any number of ranks, with the sequence cut or
// not.
TEST(TensorParallelModels, DropoutDoesNotDependOnTheRanks) {
  auto plain = made_with_dropout(0.2, 0);
  const Data data(13, 7);
  std::vector<double> expected;
  for (const int64_t n : {1, 2, 4})
    for (const bool sequence : {false, true}) {
      SCOPED_TRACE(c10::str(n, " ranks", sequence ? ", sequence parallel" : ""));
      for (const auto& trained : train_on(n, plain, {.sequence_parallel = sequence}, data, 6)) {
        if (expected.empty()) expected = trained.losses;
        expect_equal(trained.losses, expected);
        EXPECT_EQ(trained.comm, gpt2_comm(n, {.sequence_parallel = sequence}));  // masks send nothing
      }
    }
  plain->eval();
  EXPECT_GT(std::abs(train(plain, data, 1).losses[0] - expected[0]), 1e-3);  // something was dropped
}

// Attention's own dropout is drawn inside at::scaled_dot_product_attention, for a rank's heads, from LibTorch's
// generator: what it drops depends on the ranks. Ranks still agree with each other, because their heads are summed.
TEST(TensorParallelModels, AttentionsOwnDropoutKeepsRanksEqual) {
  const auto plain = made_with_dropout(0.2, 0.2);
  for (const bool sequence : {false, true}) {
    const auto each = train_on(2, plain, {.sequence_parallel = sequence}, Data(13, 7), 6);
    EXPECT_EQ(each[0].losses, each[1].losses);
  }
}

TEST(TensorParallelModels, HeadsThatDoNotDivideAreRefused) {
  auto config = kLlama;
  config.n_kv_heads = 2;
  run_ranks(4, [&](Rank& me) {
    Llama model(config);
    EXPECT_ERROR(UsageError, parallelize_module(model, me.mesh("tp=4"), tensor_parallel_plan(config)), "wk'",
                 "2 heads of 4 features", "4 ranks would cut through a head", "1, 2");
    for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
  });
}

}  // namespace
}  // namespace tessera::models
