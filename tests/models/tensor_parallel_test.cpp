// The tensor-parallel plans of the models. A model trained for 20 steps on 1, 2 and 4 ranks has the losses of the plain
// model, and communicates exactly as expected. Sequence, vocabulary and hidden sizes are not divisible by the ranks.
#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
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

using comm::CommKind;
using testing::Rank;
using testing::run_ranks;

constexpr int kLayers = 2;
constexpr double kTolerance = 1e-5;
// Larger than the rounding error of a gradient. AdamW divides by the magnitude of the gradient. A gradient that is zero
// except for rounding errors (the bias of the keys) would become a full step, which depends on the number of ranks.
constexpr double kEps = 1e-5;

const GPT2Config kGptFourHeads{.vocab_size = 13, .max_seq_len = 9, .n_layer = kLayers, .n_head = 4, .n_embd = 16};
const LlamaConfig kLlamaFourHeads{.vocab_size = 11,
                                  .max_seq_len = 9,
                                  .n_layers = kLayers,
                                  .n_heads = 8,
                                  .n_kv_heads = 4,
                                  .dim = 32,
                                  .ffn_dim = 42,
                                  .rope_theta = 100};

// The number of collectives of a phase of a step.
struct PhaseComm {
  int64_t all_reduce = 0, all_gather = 0, reduce_scatter = 0, other = 0;
  bool operator==(const PhaseComm&) const = default;
};
std::ostream& operator<<(std::ostream& out, const PhaseComm& c) {
  return out << c.all_reduce << " all_reduce, " << c.all_gather << " all_gather, " << c.reduce_scatter
             << " reduce_scatter, " << c.other << " other";
}
PhaseComm counted(const CommDebugMode& mode) {
  const auto& counts = mode.get_comm_counts();
  PhaseComm c{.all_reduce = counts.of(CommKind::AllReduce),
              .all_gather = counts.of(CommKind::AllGatherIntoTensor),
              .reduce_scatter = counts.of(CommKind::ReduceScatterTensor)};
  c.other = counts.total() - c.all_reduce - c.all_gather - c.reduce_scatter;
  return c;
}

// The collectives of one step; forward includes the loss.
struct StepComm {
  PhaseComm forward, backward, optimizer;
  int64_t implicit = 0;  // implicit redistributions in forward and backward
  bool operator==(const StepComm&) const = default;
};
std::ostream& operator<<(std::ostream& out, const StepComm& c) {
  return out << "\n  forward   " << c.forward << "\n  backward  " << c.backward << "\n  optimizer " << c.optimizer
             << "\n  implicit  " << c.implicit;
}

struct Trained {
  std::vector<double> losses;
  StepComm comm;  // of the last step, when the optimizer has state
};

struct Data {
  at::Tensor tokens, targets;
  Data(int64_t vocab, int64_t length) {
    torch::manual_seed(8);
    tokens = torch::randint(vocab, {2, length}, torch::kLong);
    targets = torch::randint(vocab, {2, length}, torch::kLong);
    targets[0][1] = -100;  // ignored
  }
};

template <class Model>
Trained train(Model& model, const Data& data, int steps, bool loss_parallel = false) {
  Trained trained;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.01).eps(kEps));
  for (int step = 0; step < steps; step++) {
    std::optional<CommDebugMode> mode;
    auto count = [&](PhaseComm& into) {
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

// A model with large weights, so that all its parts affect the loss, unlike with initial weights.
template <class Model, class Config>
Model make_model(const Config& config) {
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
void expect_same_losses(const Config& config, const Data& data, int steps, const std::vector<int64_t>& worlds,
                        StepComm (*comm)(int64_t, const PlanOptions&)) {
  const auto plain = make_model<Model>(config);
  auto alone = clone(plain);
  const auto expected = train(alone, data, steps).losses;
  ASSERT_LT(expected.back(), 0.95 * expected.front());  // the loss decreases
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

// Without sequence parallelism. Forward all-reduces the output of the embedding, of each attention and of each
// feed-forward. It all-gathers the logits, or computes the loss on sharded logits. Backward: the input of a sharded
// matrix is replicated, so its gradient is all-reduced: once per attention, once per feed-forward, once for the head.
//
// With sequence parallelism each all-reduce of forward becomes a reduce-scatter, with an all-gather before the next
// sharded matrix. In backward the two are exchanged. The gradients of norms are partial over the sequence; the
// optimizer all-reduces them.
StepComm gpt2_comm(int64_t n, const PlanOptions& options) {
  StepComm step;
  if (n == 1) return step;  // one rank does not communicate
  if (options.sequence_parallel) {
    step.forward = {.all_gather = 2 * kLayers + 1, .reduce_scatter = 2 * kLayers + 2};  // wte, wpe
    step.backward = {.all_gather = 2 * kLayers + 2, .reduce_scatter = 2 * kLayers + 1};
    step.optimizer = {.all_reduce = 2 * (2 * kLayers + 1)};  // weight and bias of each norm
  } else {
    step.forward = {.all_reduce = 2 * kLayers + 1};
    step.backward = {.all_reduce = 2 * kLayers + 1};
  }
  if (options.loss_parallel)
    step.forward.all_reduce += 3;
  else
    step.forward.all_gather += 1;
  return step;
}
StepComm llama_comm(int64_t n, const PlanOptions& options) {
  auto step = gpt2_comm(n, options);
  if (n > 1 && options.sequence_parallel) {  // no wpe, and norms without bias
    step.forward.reduce_scatter -= 1;
    step.backward.all_gather -= 1;
    step.optimizer.all_reduce /= 2;
  }
  return step;
}

TEST(TensorParallelModels, Gpt2HasTheLossesOfThePlainModel) {
  expect_same_losses<GPT2>(kGptFourHeads, Data(13, 7), 20, {1, 2, 4}, gpt2_comm);
}
TEST(TensorParallelModels, LlamaHasTheLossesOfThePlainModel) {
  expect_same_losses<Llama>(kLlamaFourHeads, Data(11, 6), 20, {1, 2, 4}, llama_comm);
}
TEST(TensorParallelModels, TiedLlamaHasTheLossesOfThePlainModel) {
  auto config = kLlamaFourHeads;
  config.tied = true;
  expect_same_losses<Llama>(config, Data(11, 7), 4, {2, 4}, llama_comm);
}

// With 4 ranks the last one has an empty shard of the sequence and of the vocabulary.
TEST(TensorParallelModels, EmptyShardsHaveTheSameLosses) {
  auto gpt = kGptFourHeads;
  gpt.vocab_size = 9;
  gpt.bias = false;
  expect_same_losses<GPT2>(gpt, Data(9, 3), 4, {4}, gpt2_comm);
  auto llama = kLlamaFourHeads;
  llama.vocab_size = 9;
  llama.ffn_dim = 9;
  expect_same_losses<Llama>(llama, Data(9, 3), 4, {4}, llama_comm);
}

GPT2 model_with_dropout(double outside_attention, double in_attention) {
  auto config = kGptFourHeads;
  config.dropout = outside_attention;
  auto model = make_model<GPT2>(config);
  for (auto& block : model->h) block->attn->config.dropout = in_attention;
  return model;
}

// Dropout masks use global indices, so they do not depend on the number of ranks or on sequence parallelism.
TEST(TensorParallelModels, DropoutDoesNotDependOnTheRanks) {
  auto plain = model_with_dropout(0.2, 0);
  const Data data(13, 7);
  std::vector<double> expected;
  for (const int64_t n : {1, 2, 4})
    for (const bool sequence : {false, true}) {
      SCOPED_TRACE(c10::str(n, " ranks", sequence ? ", sequence parallel" : ""));
      for (const auto& trained : train_on(n, plain, {.sequence_parallel = sequence}, data, 6)) {
        if (expected.empty()) expected = trained.losses;
        expect_equal(trained.losses, expected);
        EXPECT_EQ(trained.comm, gpt2_comm(n, {.sequence_parallel = sequence}));  // masks do not communicate
      }
    }
  plain->eval();
  EXPECT_GT(std::abs(train(plain, data, 1).losses[0] - expected[0]), 1e-3);  // dropout had an effect
}

// The dropout of at::scaled_dot_product_attention applies to local heads. It draws by global index too.
TEST(TensorParallelModels, DropoutInAttentionDoesNotDependOnTheRanks) {
  const auto plain = model_with_dropout(0.2, 0.2);
  std::vector<double> expected;
  for (const int64_t n : {1, 2, 4})
    for (const bool sequence : {false, true})
      for (const auto& trained : train_on(n, plain, {.sequence_parallel = sequence}, Data(13, 7), 3)) {
        SCOPED_TRACE(c10::str(n, " ranks", sequence ? ", sequence parallel" : ""));
        if (expected.empty()) expected = trained.losses;
        expect_equal(trained.losses, expected);
      }
}

TEST(TensorParallelModels, HeadsThatAreNotDivisibleByTheRanksThrow) {
  auto config = kLlamaFourHeads;
  config.n_kv_heads = 2;
  run_ranks(4, [&](Rank& me) {
    Llama model(config);
    EXPECT_ERROR(UsageError, parallelize_module(model, me.mesh("tp=4"), tensor_parallel_plan(config)), "wk'",
                 "2 heads of 4 features", "4 ranks would split a head", "1, 2");
    for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
  });
}

}  // namespace
}  // namespace tessera::models
