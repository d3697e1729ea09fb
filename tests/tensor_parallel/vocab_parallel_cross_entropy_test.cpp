// The loss over sharded classes: its value and gradients equal those of the plain cross entropy, and it exchanges three
// values per position.
#include "tessera/tensor_parallel/detail/vocab_parallel_cross_entropy.h"

#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::close;
using testing::error_message;
using testing::Rank;
using testing::run_ranks;
using testing::Tolerance;

constexpr auto kNone = at::Reduction::None, kMean = at::Reduction::Mean, kSum = at::Reduction::Sum;

Tolerance tolerance(const at::Tensor& t) {
  const double limit = t.scalar_type() == torch::kDouble ? 1e-12 : 1e-6;
  return {limit, limit};
}

struct Sample {
  at::Tensor logits, target;
  CrossEntropyOptions options;
};

// One target is ignored, if there are several.
Sample make_sample(std::vector<int64_t> sizes, torch::Dtype type, CrossEntropyOptions options, bool weighted) {
  const int64_t dim = sizes.size() == 1 ? 0 : 1, classes = sizes[dim];
  auto logits = torch::randn(sizes, type) * 3;
  sizes.erase(sizes.begin() + dim);
  auto target = torch::randint(classes, sizes, torch::kLong);
  if (target.numel() > 1) target.flatten()[1] = options.ignore_index;
  if (weighted) options.weight = torch::rand({classes}, type) + 0.5;
  return {logits, target, options};
}

struct Result {
  at::Tensor loss, gradient;
};

// The gradient of the loss. It has a different value for each element of an unreduced loss.
at::Tensor seed_like(const at::Tensor& loss) {
  return (torch::arange(loss.numel(), loss.options()) + 1).view(loss.sizes());
}
Result plain(const Sample& s) {
  auto x = s.logits.clone().set_requires_grad(true);
  auto loss = at::cross_entropy_loss(x, s.target, s.options.weight, s.options.reduction, s.options.ignore_index,
                                     s.options.label_smoothing);
  loss.backward(seed_like(loss.detach()));
  return {loss.detach(), x.grad()};
}

struct Distributed {
  Result full;
  Placements loss, gradient;
  int64_t forward, backward;  // the number of collectives
};
Distributed distributed(const Sample& s, const DeviceMesh& mesh, PlacementsRef placements) {
  auto x = distribute_tensor(s.logits, mesh, placements).set_requires_grad(true);
  CommDebugMode mode;
  const DTensor loss = vocab_parallel_cross_entropy(x, s.target, s.options);
  const auto forward = mode.get_total_counts();
  EXPECT_EQ(mode.get_comm_counts().of(comm::CommKind::AllReduce), forward);
  Placements seed_placements(loss.placements().begin(), loss.placements().end());
  for (auto& p : seed_placements)
    if (p.is_partial()) p = Replicate();
  const auto seed = distribute_tensor(seed_like(torch::empty(loss.sizes(), loss.options())), mesh, seed_placements,
                                      {.src_data_rank = std::nullopt});
  mode.reset();
  loss.backward(seed);
  const auto backward = mode.get_total_counts();
  mode.exit();
  const DTensor gradient = x.grad();
  return {{loss.full_tensor().detach(), gradient.full_tensor()},
          Placements(loss.placements()),
          Placements(gradient.placements()),
          forward,
          backward};
}

void expect_same(const Result& actual, const Result& expected, Tolerance limits, const std::string& what) {
  EXPECT_EQ(close(actual.loss, expected.loss, limits), "") << what;
  EXPECT_EQ(close(actual.gradient, expected.gradient, limits), "") << what;
}

TEST(VocabParallelCrossEntropy, EqualsPlainCrossEntropy) {
  torch::manual_seed(1);
  std::vector<Sample> samples;
  for (auto type : {torch::kFloat, torch::kDouble})
    for (const auto& sizes : std::vector<std::vector<int64_t>>{{6, 10}, {5, 3}, {2, 10, 3, 2}, {10}})
      for (auto reduction : {kNone, kMean, kSum})
        for (double smoothing : {0., 0.1})
          for (bool weighted : {false, true})
            samples.push_back(make_sample(
                sizes, type, {.reduction = reduction, .ignore_index = 2, .label_smoothing = smoothing}, weighted));
  samples.push_back(make_sample({64, 1001}, torch::kFloat, {.label_smoothing = 0.1}, true));
  for (int n : {1, 2, 3, 4})
    run_ranks(n, [&](Rank&) {
      const auto mesh = init_device_mesh("cpu", {n}, {"tp"});
      for (const auto& s : samples) {
        const auto what = c10::str(n, " ranks, sizes ", s.logits.sizes(), ", reduction ", int{s.options.reduction},
                                   ", smoothing ", s.options.label_smoothing, ", ", s.logits.scalar_type());
        const auto sharding = Shard(s.logits.dim() == 1 ? 0 : 1);
        const auto found = distributed(s, mesh, {sharding});
        expect_same(found.full, plain(s), tolerance(s.logits), what);
        EXPECT_EQ(found.loss[0], Replicate()) << what;
        EXPECT_EQ(found.gradient[0], sharding) << what;
        EXPECT_EQ(found.forward, 3) << what;
        EXPECT_EQ(found.backward, 0) << what;
      }
    });
}

TEST(VocabParallelCrossEntropy, EqualsPlainCrossEntropyForAllShardingsOfClasses) {
  torch::manual_seed(2);
  const auto s = make_sample({4, 12}, torch::kDouble, {.label_smoothing = 0.2}, true);
  run_ranks(4, [&](Rank& me) {
    const struct {
      const char* mesh;
      Placements placements;
      int64_t forward;
    } kCases[] = {
        {"tp=4", {Shard(1, 5)}, 3},            // 5 5 2 0
        {"tp=4", {StridedShard(1, 3)}, 3},     // one class of each of three sections
        {"tp=4", {StridedShard(1, 2)}, 3},     // 4 4 4 0
        {"a=2,b=2", {Shard(1), Shard(1)}, 6},  // sharded over two axes; both communicate
        {"a=2,b=2", {StridedShard(1, 2), Shard(1)}, 6},
        {"a=2,b=2", {Replicate(), Shard(1)}, 3},
    };
    for (const auto& c : kCases) {
      const auto found = distributed(s, me.mesh(c.mesh), c.placements);
      expect_same(found.full, plain(s), {1e-12, 1e-12}, to_string(c.placements));
      EXPECT_EQ(found.forward, c.forward) << to_string(c.placements);
      EXPECT_EQ(found.backward, 0) << to_string(c.placements);
    }
  });
}

// 5 positions over 2 ranks, 3 classes over 2 ranks. The mean is over the global batch, and its denominator is
// all-reduced over dp.
TEST(VocabParallelCrossEntropy, PositionsMayBeShardedOverOtherAxes) {
  torch::manual_seed(3);
  const struct {
    at::Reduction::Reduction reduction;
    Placement loss;
    int64_t forward;
  } kCases[] = {{kNone, Shard(0), 3}, {kSum, Partial(), 3}, {kMean, Partial(), 4}};
  for (const auto& c : kCases) {
    const auto s = make_sample({5, 3, 2}, torch::kDouble, {.reduction = c.reduction, .label_smoothing = 0.1}, true);
    run_ranks(4, [&](Rank& me) {
      const auto mesh = me.mesh("dp=2,tp=2");
      auto found = distributed(s, mesh, {Shard(0), Shard(1)});
      expect_same(found.full, plain(s), {1e-12, 1e-12}, "batch sharded");
      EXPECT_EQ(found.loss, (Placements{c.loss, Replicate()}));
      EXPECT_EQ(found.gradient, (Placements{Shard(0), Shard(1)}));
      EXPECT_EQ(found.forward, c.forward);
      EXPECT_EQ(found.backward, 0);
      found = distributed(s, mesh, {Shard(2), Shard(1)});  // a dim after the classes
      expect_same(found.full, plain(s), {1e-12, 1e-12}, "last dim sharded");
      EXPECT_EQ(found.loss[0], c.loss.is_sharded() ? Shard(1) : c.loss);
      found = distributed(s, mesh, {Shard(0), Replicate()});  // classes are not sharded: only the mean communicates
      expect_same(found.full, plain(s), {1e-12, 1e-12}, "only the batch sharded");
      EXPECT_EQ(found.forward, c.forward - 3);
    });
  }
}

TEST(VocabParallelCrossEntropy, TheTargetMayHaveAnyPlacements) {
  torch::manual_seed(5);
  const auto s = make_sample({6, 4}, torch::kDouble, {}, true);
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto logits = distribute_tensor(s.logits, mesh, {Shard(0), Shard(1)});
    for (const auto& placements :
         {Placements{Shard(0), Replicate()}, Placements{Replicate(), Replicate()}, Placements{Replicate(), Shard(0)}}) {
      auto options = s.options;
      options.weight = distribute_tensor(s.options.weight, mesh, {Replicate(), Shard(0)});
      const DTensor loss = vocab_parallel_cross_entropy(logits, distribute_tensor(s.target, mesh, placements), options);
      EXPECT_EQ(close(loss.full_tensor(), plain(s).loss, {1e-12, 1e-12}), "") << to_string(placements);
    }
  });
}

// Partial logits are reduced first. Each rank gets the gradient.
TEST(VocabParallelCrossEntropy, LogitsMayBePartial) {
  torch::manual_seed(6);
  const auto s = make_sample({6, 4}, torch::kDouble, {}, false);
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto half = DTensor(distribute_tensor(s.logits / 2, mesh, {Replicate(), Shard(1)})).to_local();
    auto partial = DTensor::from_local(half, mesh, {Partial(), Shard(1)}).set_requires_grad(true);
    const DTensor loss = vocab_parallel_cross_entropy(partial, s.target);
    EXPECT_EQ(close(loss.full_tensor().detach(), plain(s).loss, {1e-12, 1e-12}), "");
    loss.backward();
    EXPECT_EQ(close(DTensor(partial.grad()).full_tensor(), plain(s).gradient, {1e-12, 1e-12}), "");
  });
}

TEST(VocabParallelCrossEntropy, LargeLogitsAndMinusInfinity) {
  torch::manual_seed(7);
  auto huge = make_sample({6, 10}, torch::kFloat, {.label_smoothing = 0.1}, false);
  huge.logits = huge.logits * 1e4;
  auto shifted = make_sample({6, 10}, torch::kFloat, {}, false);
  shifted.logits = shifted.logits + 1e5;  // only the differences matter
  auto masked = make_sample({6, 10}, torch::kFloat, {}, false);
  masked.logits.slice(1, 0, 5).fill_(-std::numeric_limits<float>::infinity());  // all classes of the first rank
  masked.target.clamp_(5, 9);
  auto all_masked = masked;
  all_masked.logits = torch::full({6, 10}, -std::numeric_limits<float>::infinity());
  run_ranks(2, [&](Rank& me) {
    for (const auto* s : {&huge, &shifted, &masked, &all_masked})
      expect_same(distributed(*s, me.mesh("tp=2"), {Shard(1)}).full, plain(*s), {1e-6, 1e-6}, "");
  });
  auto low = make_sample({6, 3}, torch::kFloat, {}, false);  // the last of four ranks has no class
  low.logits = low.logits - 1e4;
  run_ranks(4, [&](Rank& me) {
    expect_same(distributed(low, me.mesh("tp=4"), {Shard(1)}).full, plain(low), {1e-6, 1e-6}, "");
  });
}

TEST(VocabParallelCrossEntropy, AMeanOverNoPositionIsNaNWithZeroGradient) {
  for (double smoothing : {0., 0.1})
    run_ranks(2, [&](Rank& me) {
      Sample s{torch::randn({3, 4}), torch::full({3}, -100), {.label_smoothing = smoothing}};
      const auto found = distributed(s, me.mesh("tp=2"), {Shard(1)}).full;
      EXPECT_TRUE(std::isnan(found.loss.item<float>()));
      EXPECT_TRUE(torch::equal(found.gradient, torch::zeros({3, 4})));
      expect_same(found, plain(s), {0, 0}, "LibTorch");
      s.options.reduction = kSum;
      EXPECT_EQ(distributed(s, me.mesh("tp=2"), {Shard(1)}).full.loss.item<float>(), 0);
    });
}

// LibTorch rounds the log-probabilities to bfloat16 before the sum.
TEST(VocabParallelCrossEntropy, BFloat16IsSummedInFloat) {
  torch::manual_seed(8);
  auto s = make_sample({64, 50}, torch::kBFloat16, {.label_smoothing = 0.1}, true);
  auto wide = s;
  wide.logits = s.logits.to(torch::kFloat);
  wide.options.weight = s.options.weight.to(torch::kFloat);
  run_ranks(2, [&](Rank& me) {
    const auto found = distributed(s, me.mesh("tp=2"), {Shard(1)}).full;
    EXPECT_EQ(found.loss.scalar_type(), torch::kBFloat16);
    EXPECT_EQ(found.gradient.scalar_type(), torch::kBFloat16);
    const auto expected = plain(wide);
    const double step = 1. / 256;  // half of the distance between neighboring bfloat16 values
    EXPECT_EQ(close(found.loss.to(torch::kFloat), expected.loss, {step, 0}), "");
    EXPECT_EQ(close(found.gradient.to(torch::kFloat), expected.gradient, {step, 1e-6}), "");
  });
}

TEST(VocabParallelCrossEntropy, ClassesNeedNotBeLastInMemory) {
  torch::manual_seed(9);
  auto s = make_sample({2, 5, 6}, torch::kDouble, {}, false);  // (batch, classes, sequence)
  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    auto x = distribute_tensor(s.logits.transpose(1, 2).contiguous(), mesh, {Shard(2)}).set_requires_grad(true);
    vocab_parallel_cross_entropy(x.transpose(1, 2), s.target).backward();
    EXPECT_EQ(close(DTensor(x.grad()).full_tensor(), plain(s).gradient.transpose(1, 2), {1e-12, 1e-12}), "");
  });
}

TEST(VocabParallelCrossEntropy, PlainTensorsUseLibTorch) {
  torch::manual_seed(10);
  const auto s = make_sample({6, 4}, torch::kFloat, {.label_smoothing = 0.1}, true);
  EXPECT_TRUE(torch::equal(vocab_parallel_cross_entropy(s.logits, s.target, s.options), plain(s).loss));
  EXPECT_TRUE(torch::equal(vocab_parallel_nll_loss(s.logits, s.target), at::nll_loss(s.logits, s.target)));
  EXPECT_FALSE(classes_are_sharded(s.logits));
  run_ranks(2, [&](Rank& me) {
    EXPECT_TRUE(classes_are_sharded(distribute_tensor(s.logits, me.mesh("tp=2"), {Shard(1)})));
    EXPECT_FALSE(classes_are_sharded(distribute_tensor(s.logits, me.mesh("tp=2"), {Shard(0)})));
    EXPECT_TRUE(classes_are_sharded(distribute_tensor(s.logits[0], me.mesh("tp=2"), {Shard(0)})));
  });
}

// The communication is explicit, so CommPolicy::Error allows it.
TEST(VocabParallelCrossEntropy, WorksUnderCommPolicyErrorAndInInferenceMode) {
  torch::manual_seed(11);
  const auto s = make_sample({5, 6}, torch::kDouble, {}, false);
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    CommPolicyScope strict(CommPolicy::Error);
    expect_same(distributed(s, mesh, {Shard(0), Shard(1)}).full, plain(s), {1e-12, 1e-12}, "");
    const auto logits = distribute_tensor(s.logits, mesh, {Shard(0), Shard(1)});
    const auto expected = plain(s).loss;
    c10::InferenceMode inference;
    EXPECT_EQ(close(DTensor(vocab_parallel_cross_entropy(logits, s.target)).full_tensor(), expected, {1e-12, 1e-12}),
              "");
  });
}

TEST(VocabParallelCrossEntropy, DoubleBackwardThrows) {
  run_ranks(2, [](Rank& me) {
    auto x = distribute_tensor(torch::randn({3, 4}), me.mesh("tp=2"), {Shard(1)}).set_requires_grad(true);
    const auto target = torch::zeros({3}, torch::kLong);
    const auto loss = vocab_parallel_cross_entropy(x, target);
    const auto gradient = torch::autograd::grad({loss}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    EXPECT_CONTAINS(error_message([&] { gradient.sum().backward(); }),
                    "derivative for the gradient of a vocab-parallel loss is not implemented");
    loss.backward();
    EXPECT_CONTAINS(error_message([&] { loss.backward(); }), "backward through the graph a second time");
  });
}

TEST(VocabParallelCrossEntropy, InvalidArgumentsThrowBeforeCommunication) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto x = distribute_tensor(torch::randn({3, 4}), mesh, {Shard(1)});
    const auto target = torch::tensor({0, 1, 3}, torch::kLong);
    const auto said = [&](const at::Tensor& t, CrossEntropyOptions options = {}) {
      CommDebugMode mode;
      const auto text = error_message<UsageError>([&] { vocab_parallel_cross_entropy(x, t, options); });
      EXPECT_EQ(mode.get_total_counts(), 0) << text;
      return text;
    };
    EXPECT_CONTAINS(said(torch::rand({3})),
                    "target is Float; pass class indices, as Long. Probabilities need unsharded classes");
    EXPECT_CONTAINS(said({}), "target is undefined");
    EXPECT_CONTAINS(
        said(target.slice(0, 0, 2)),
        "scores of sizes [3, 4] need a target of sizes [3]; found [2]. A plain target is the global target");
    EXPECT_CONTAINS(said(target, {.weight = torch::ones({2})}),
                    "weight is Float of sizes [2]; pass a Float tensor with one value for each of the 4 classes");
    EXPECT_CONTAINS(said(target, {.weight = torch::ones({4}, torch::kDouble)}), "weight is Double");
    EXPECT_CONTAINS(said(target, {.label_smoothing = 1.5}), "label_smoothing is 1.5; it must be between 0 and 1");
    EXPECT_CONTAINS(said(target, {.reduction = at::Reduction::END}), "reduction is 3; use");
    const auto other_mesh = distribute_tensor(target, me.mesh("other=2"), {Replicate()});
    EXPECT_CONTAINS(said(other_mesh), "distribute both over the same mesh");
    EXPECT_CONTAINS(error_message<UsageError>([&] { vocab_parallel_nll_loss(x, target, {.label_smoothing = 0.1}); }),
                    "use vocab_parallel_cross_entropy, which takes logits, for label smoothing");
    for (int64_t bad : {4, -1})
      EXPECT_CONTAINS(error_message<c10::IndexError>([&] {
                        vocab_parallel_cross_entropy(x, torch::tensor({int64_t{0}, int64_t{1}, bad}));
                      }),
                      c10::str("target ", bad, " is out of bounds; classes are 0 to 3, and ignore_index is -100"));
    const auto loss = vocab_parallel_cross_entropy(x.detach().set_requires_grad(true), target, {.reduction = kNone});
    EXPECT_CONTAINS(error_message<UsageError>([&] { loss.backward(torch::ones({3})); }),
                    "backward of a vocab-parallel loss: the gradient is a plain tensor of sizes [3]");
  });
}

}  // namespace
}  // namespace tessera
