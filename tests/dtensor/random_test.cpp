// Random values depend on the global index: the same bits with all placements and on any number of ranks.
#include "tessera/dtensor/random.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/detail/recorder.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && torch::equal(a.contiguous(), b.contiguous());
}

struct MeshAndPlacements {
  std::vector<int64_t> mesh;
  Placements placements;
};

// Replicated, sharded, block-sharded, strided, nested shards; uneven and empty local tensors.
std::vector<MeshAndPlacements> layouts() {
  std::vector<MeshAndPlacements> all;
  for (int64_t n : {1, 2, 3, 4})
    for (const auto& p :
         {Replicate(), Shard(0), Shard(1), Shard(0, 4), Shard(1, 3), StridedShard(0, 2), StridedShard(1, 3)})
      all.push_back({{n}, {p}});
  for (const char* text : {"S(0),S(0)", "S(1),S(1)", "SS(0,2),S(0)", "S(0),S(1)", "S(1),S(0)", "S(0),R", "R,S(1)",
                           "SS(1,2),S(1)", "S(0,4),S(0)"})
    all.push_back({{2, 2}, parse_placements(text)});
  return all;
}

// Runs `body` for each layout, on the ranks of its mesh.
void on_every_layout(const std::function<void(const DeviceMesh&, const Placements&)>& body) {
  for (const auto& layout : layouts()) {
    SCOPED_TRACE(c10::str("mesh ", c10::IntArrayRef(layout.mesh), " ", to_string(layout.placements)));
    run_ranks(c10::multiply_integers(layout.mesh), [&](Rank& me) { body(me.mesh(layout.mesh), layout.placements); });
  }
}

struct FillCase {
  const char* name;
  std::function<void(at::Tensor&)> fill;
};
const FillCase kFills[] = {
    {"uniform_", [](at::Tensor& t) { t.uniform_(-1, 3); }},
    {"normal_", [](at::Tensor& t) { t.normal_(1, 2); }},
    {"bernoulli_", [](at::Tensor& t) { t.bernoulli_(0.3); }},
    {"exponential_", [](at::Tensor& t) { t.exponential_(2); }},
    {"log_normal_", [](at::Tensor& t) { t.log_normal_(0, 0.5); }},
    {"cauchy_", [](at::Tensor& t) { t.cauchy_(); }},
    {"geometric_", [](at::Tensor& t) { t.geometric_(0.3); }},
    {"random_", [](at::Tensor& t) { t.random_(); }},
    {"random_.from", [](at::Tensor& t) { t.random_(-3, 100); }},
};

// The reference: the values of a fill on one rank.
template <class F>
at::Tensor on_one_rank(c10::IntArrayRef sizes, at::ScalarType dtype, F fill) {
  at::Tensor result;
  run_ranks(1, [&](Rank& me) {
    manual_seed(42);
    at::Tensor t = zeros(sizes, me.mesh("x=1"), {}, dtype);
    fill(t);
    result = DTensor(t).full_tensor().clone();
  });
  return result;
}

TEST(Random, FillsGiveTheSameBitsForAllPlacements) {
  for (const auto& fill_case : kFills)
    for (auto dtype : {torch::kFloat, torch::kDouble, torch::kBFloat16, torch::kHalf}) {
      SCOPED_TRACE(c10::str(fill_case.name, " ", dtype));
      const auto expected = on_one_rank({7, 10}, dtype, fill_case.fill);
      EXPECT_FALSE(torch::equal(expected, torch::zeros_like(expected)));
      on_every_layout([&](const DeviceMesh& mesh, const Placements& placements) {
        manual_seed(42);
        at::Tensor t = zeros({7, 10}, mesh, placements, dtype);
        fill_case.fill(t);
        EXPECT_TRUE(same_bits(DTensor(t).full_tensor(), expected));
      });
    }
}

TEST(Random, LocalTensorsMayBeEmptyAndHaveManyDims) {
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{2, 2}, {1, 5}, {3, 4, 5}, {2, 7, 3, 5}, {5, 0}}) {
    const auto expected = on_one_rank(sizes, torch::kFloat, [](at::Tensor& t) { t.normal_(); });
    on_every_layout([&](const DeviceMesh& mesh, const Placements& placements) {
      manual_seed(42);
      EXPECT_TRUE(same_bits(randn(sizes, mesh, placements).full_tensor(), expected));
    });
  }
}

TEST(Random, OtherTypes) {
  const std::vector<std::pair<at::ScalarType, std::function<void(at::Tensor&)>>> cases = {
      {torch::kComplexFloat, [](at::Tensor& t) { t.normal_(1, 2); }},
      {torch::kBool, [](at::Tensor& t) { t.bernoulli_(0.4); }},
      {torch::kLong, [](at::Tensor& t) { t.random_(); }},
      {torch::kLong, [](at::Tensor& t) { t.random_(-9, std::optional<int64_t>()); }},
      {torch::kByte, [](at::Tensor& t) { t.random_(200); }},
  };
  for (const auto& [dtype, fill] : cases) {
    SCOPED_TRACE(dtype);
    const auto expected = on_one_rank({7, 10}, dtype, fill);
    on_every_layout([&, dtype = dtype, &fill = fill](const DeviceMesh& mesh, const Placements& placements) {
      manual_seed(42);
      at::Tensor t = zeros({7, 10}, mesh, placements, dtype);
      fill(t);
      EXPECT_TRUE(same_bits(DTensor(t).full_tensor(), expected));
    });
  }
}

TEST(Random, PlainTensorsGetTheSameBits) {
  const auto expected = on_one_rank({7, 10}, torch::kFloat, [](at::Tensor& t) { t.uniform_(); });
  manual_seed(42);
  EXPECT_TRUE(same_bits(random::rand({7, 10}), expected));  // on a thread without a world
  on_every_layout([&](const DeviceMesh& mesh, const Placements& placements) {
    manual_seed(42);
    const auto a = random::rand({7, 10});
    const DTensor b = randn({7, 10}, mesh, placements);
    auto c = torch::empty({7, 10}, torch::kDouble);
    random::bernoulli_(c, 0.5);
    manual_seed(42);
    const DTensor a2 = rand({7, 10}, mesh, placements);
    const auto b2 = random::randn({7, 10});
    at::Tensor c2 = empty({7, 10}, mesh, placements, torch::kDouble);
    random::bernoulli_(c2, 0.5);
    EXPECT_TRUE(same_bits(a, expected));
    EXPECT_TRUE(same_bits(a2.full_tensor(), a));
    EXPECT_TRUE(same_bits(b.full_tensor(), b2));
    EXPECT_TRUE(same_bits(DTensor(c2).full_tensor(), c));
  });
}

TEST(Random, LargeTensorsAreFilledByManyThreads) {
  manual_seed(1);
  const auto at_once = random::randn({300, 1001});
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  manual_seed(1);
  const auto parts = parts_run_by_other_threads();
  EXPECT_TRUE(same_bits(random::randn({300, 1001}), at_once));
  EXPECT_GT(parts_run_by_other_threads(), parts);
  at::set_num_threads(threads);
  EXPECT_NEAR(at_once.mean().item<double>(), 0, 0.01);
  EXPECT_NEAR(at_once.std().item<double>(), 1, 0.01);
}

TEST(Random, StridesDoNotChangeTheValues) {
  manual_seed(3);
  const auto expected = random::randn({10, 7});
  on_every_layout([&](const DeviceMesh& mesh, const Placements& placements) {
    manual_seed(3);
    auto t = torch::empty({7, 10}).t();
    random::normal_(t);
    EXPECT_TRUE(same_bits(t, expected));
    manual_seed(3);
    at::Tensor d = zeros({7, 10}, mesh, placements);
    auto view = d.t();
    view.normal_();  // a view: writes to d
    EXPECT_TRUE(same_bits(DTensor(view).full_tensor(), expected));
    EXPECT_TRUE(same_bits(DTensor(d).full_tensor(), expected.t()));
  });
}

TEST(Random, EachFillAdvancesTheOffsetByOne) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    manual_seed(5);
    const auto a = rand({6, 4}, mesh, {Shard(0)}).full_tensor(), b = rand({6, 4}, mesh, {Shard(0)}).full_tensor();
    EXPECT_FALSE(torch::equal(a, b));
    EXPECT_EQ(me.world.random().offset, 2u);
    me.world.random().offset = 1;
    EXPECT_TRUE(same_bits(rand({6, 4}, mesh, {Shard(1)}).full_tensor(), b));
    manual_seed(6);
    EXPECT_EQ(me.world.random().offset, 0u);
    EXPECT_FALSE(torch::equal(rand({6, 4}, mesh, {Shard(0)}).full_tensor(), a));
    {
      random::SeedScope scope(5);
      EXPECT_TRUE(same_bits(rand({6, 4}, mesh, {Shard(0)}).full_tensor(), a));
    }
    EXPECT_EQ(me.world.random().seed, 6u);
    EXPECT_EQ(me.world.random().offset, 1u);
  });
}

TEST(Random, LibTorchsGeneratorIsNotUsed) {
  torch::manual_seed(9);
  const auto expected = torch::rand({5});
  run_ranks(1, [&](Rank& me) {
    torch::manual_seed(9);
    auto t = rand({5}, me.mesh("x=1"), {Shard(0)});
    torch::dropout(t, 0.5, true);
    random::randn({3});
    EXPECT_TRUE(same_bits(torch::rand({5}), expected));
  });
}

// ---- new tensors ----

TEST(Random, LikeFactoriesAndFunctionalForms) {
  const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> cases = {
      {"rand_like", [](const at::Tensor& t) { return torch::rand_like(t); }},
      {"rand_like double", [](const at::Tensor& t) { return torch::rand_like(t, torch::kDouble); }},
      {"randn_like", [](const at::Tensor& t) { return torch::randn_like(t); }},
      {"randint_like", [](const at::Tensor& t) { return torch::randint_like(t, 17); }},
      {"randint_like low", [](const at::Tensor& t) { return torch::randint_like(t, -5, 17, torch::kLong); }},
      {"bernoulli", [](const at::Tensor& t) { return torch::bernoulli(t); }},
      {"bernoulli p", [](const at::Tensor& t) { return torch::bernoulli(t, 0.4); }},
      {"normal mean", [](const at::Tensor& t) { return at::normal(t, 2.0); }},
      {"normal std", [](const at::Tensor& t) { return at::normal(1.0, t); }},
      {"normal both", [](const at::Tensor& t) { return at::normal(t, t); }},
      {"bernoulli_ of a tensor", [](const at::Tensor& t) { return torch::zeros_like(t).bernoulli_(t); }},
      {"multinomial 1", [](const at::Tensor& t) { return torch::multinomial(t, 1); }},
      {"multinomial 3", [](const at::Tensor& t) { return torch::multinomial(t, 3); }},
      {"multinomial with replacement", [](const at::Tensor& t) { return torch::multinomial(t, 4, true); }},
  };
  for (const auto& [name, draw] : cases) {
    SCOPED_TRACE(name);
    at::Tensor expected;
    run_ranks(1, [&, &draw = draw](Rank& me) {
      manual_seed(8);
      expected = DTensor(draw(rand({7, 10}, me.mesh("x=1")))).full_tensor().clone();
    });
    on_every_layout([&, &draw = draw](const DeviceMesh& mesh, const Placements& placements) {
      manual_seed(8);
      EXPECT_TRUE(same_bits(DTensor(draw(rand({7, 10}, mesh, placements))).full_tensor(), expected));
    });
  }
}

TEST(Random, LikeFactoriesKeepThePlacements) {
  run_ranks(2, [](Rank& me) {
    const auto x = rand({8, 6}, me.mesh("x=2"), {Shard(1)});
    EXPECT_EQ(DTensor(torch::randn_like(x)).placements(), x.placements());
    EXPECT_EQ(torch::randint_like(x, 3, torch::kLong).scalar_type(), torch::kLong);
    EXPECT_EQ(torch::rand_like(x).is_contiguous(), true);
  });
}

TEST(Random, MultinomialDrawsByWeight) {
  run_ranks(2, [](Rank& me) {
    manual_seed(2);
    const auto weights = torch::tensor({1., 2., 3., 4.}).expand({20000, 4}).contiguous();
    const auto drawn =
        DTensor(torch::multinomial(distribute_tensor(weights, me.mesh("x=2"), {Shard(0)}), 1)).full_tensor();
    for (int64_t k = 0; k < 4; k++)
      EXPECT_NEAR((drawn == k).to(torch::kDouble).mean().item<double>(), 0.1 * static_cast<double>(k + 1), 0.02);
  });
}

// ---- dropout ----

// Value, mask and gradient are equal on all layouts.
void check_dropout(const std::function<at::Tensor(const at::Tensor&)>& dropout, std::vector<int64_t> sizes) {
  at::Tensor expected, expected_grad;
  const auto run = [&](const DTensor& x, at::Tensor& y, at::Tensor& grad) {
    manual_seed(77);
    at::Tensor leaf = x.detach().requires_grad_();
    const auto out = dropout(leaf);
    out.sum().backward();
    y = DTensor(out.detach()).full_tensor().clone();
    grad = DTensor(leaf.grad()).full_tensor().clone();
  };
  const auto value = torch::rand(sizes) + 1;
  run_ranks(1, [&](Rank& me) { run(distribute_tensor(value, me.mesh("x=1")), expected, expected_grad); });
  EXPECT_GT((expected == 0).sum().item<int64_t>() + (expected_grad == 0).sum().item<int64_t>(), 0);
  on_every_layout([&](const DeviceMesh& mesh, const Placements& placements) {
    at::Tensor y, grad;
    run(distribute_tensor(value, mesh, placements), y, grad);
    EXPECT_TRUE(same_bits(y, expected));
    EXPECT_TRUE(same_bits(grad, expected_grad));
  });
}

TEST(Dropout, Functional) {
  check_dropout([](const at::Tensor& t) { return torch::dropout(t, 0.4, true); }, {7, 10});
}
TEST(Dropout, Native) {
  check_dropout([](const at::Tensor& t) { return std::get<0>(at::native_dropout(t, 0.4, true)); }, {7, 10});
}
TEST(Dropout, NativeOfATransposedTensor) {
  check_dropout([](const at::Tensor& t) { return std::get<0>(at::native_dropout(t.t(), 0.4, true)); }, {7, 10});
}
TEST(Dropout, Alpha) {
  check_dropout([](const at::Tensor& t) { return torch::alpha_dropout(t, 0.4, true); }, {7, 10});
}
TEST(Dropout, Feature) {
  check_dropout([](const at::Tensor& t) { return torch::feature_dropout(t, 0.4, true); }, {7, 10, 3});
}
TEST(Dropout, FeatureAlpha) {
  check_dropout([](const at::Tensor& t) { return torch::feature_alpha_dropout(t, 0.4, true); }, {7, 10, 3});
}
TEST(Dropout, Module) {
  check_dropout([](const at::Tensor& t) { return torch::nn::Dropout(0.4)->forward(t); }, {7, 10});
}

TEST(Dropout, PlainAndDistributedAgree) {
  manual_seed(4);
  auto x = torch::rand({7, 10}).requires_grad_();
  const auto expected = random::dropout(x, 0.3, true);
  expected.sum().backward();
  on_every_layout([&](const DeviceMesh& mesh, const Placements& placements) {
    manual_seed(4);
    auto d = distribute_tensor(x.detach(), mesh, placements, {.src_data_rank = std::nullopt});
    d.requires_grad_();
    const DTensor y = random::dropout(d, 0.3, true);
    y.sum().backward();
    EXPECT_TRUE(same_bits(y.full_tensor(), expected));
    EXPECT_TRUE(same_bits(DTensor(d.grad()).full_tensor(), x.grad()));
  });
}

TEST(Dropout, NativeDropsTheGivenFractionAndScales) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    const auto x = ones({100, 100}, mesh, {Shard(0)});
    const auto [y, mask] = at::native_dropout(x, 0.25, true);
    const auto full_mask = DTensor(mask).full_tensor();
    EXPECT_EQ(full_mask.scalar_type(), torch::kBool);
    EXPECT_NEAR(full_mask.to(torch::kDouble).mean().item<double>(), 0.75, 0.02);
    EXPECT_TRUE(torch::equal(DTensor(y).full_tensor(), full_mask.to(torch::kFloat) * static_cast<float>(1 / 0.75)));
    EXPECT_EQ(DTensor(y).placements(), x.placements());
    const auto before = me.world.random().offset;
    const auto [same, all] = at::native_dropout(x, 0.25, false);
    EXPECT_TRUE(torch::equal(DTensor(same).full_tensor(), torch::ones({100, 100})));
    EXPECT_TRUE(DTensor(all).full_tensor().all().item<bool>());
    EXPECT_EQ(me.world.random().offset, before);  // no fill was counted
    for (double p : {0., 1.}) {
      const auto out = DTensor(std::get<0>(at::native_dropout(x, p, true))).full_tensor();
      EXPECT_TRUE(torch::equal(out, torch::full({100, 100}, 1 - p, torch::kFloat)));
    }
  });
}

TEST(Dropout, OfAPartialIsMaskedBeforeItIsReduced) {
  run_ranks(2, [](Rank& me) {
    const auto partial = DTensor::from_local(torch::ones({8, 8}), me.mesh("x=2"), {Partial()});
    const DTensor y = torch::dropout(partial, 0.5, true);
    const auto full = y.full_tensor();
    EXPECT_TRUE(((full == 0) | (full == 4)).all().item<bool>()) << full;
  });
}

// ---- initializers ----

TEST(Random, InitFunctionsWorkOnDistributedParameters) {
  using namespace torch::nn::init;
  const std::vector<std::function<void(at::Tensor)>> inits = {
      [](at::Tensor t) { xavier_uniform_(t); },  [](at::Tensor t) { xavier_normal_(t); },
      [](at::Tensor t) { kaiming_uniform_(t); }, [](at::Tensor t) { kaiming_normal_(t); },
      [](at::Tensor t) { uniform_(t, -2, 2); },  [](at::Tensor t) { normal_(t, 0, 0.02); },
  };
  for (size_t i = 0; i < inits.size(); i++) {
    SCOPED_TRACE(i);
    const auto expected =
        on_one_rank({12, 10}, torch::kFloat, [&](at::Tensor& t) { inits[i](t.requires_grad_()); }).detach();
    on_every_layout([&](const DeviceMesh& mesh, const Placements& placements) {
      manual_seed(42);
      at::Tensor t = zeros({12, 10}, mesh, placements).requires_grad_();
      inits[i](t);
      EXPECT_TRUE(same_bits(DTensor(t).full_tensor().detach(), expected));
    });
  }
}

TEST(Random, FillsBumpVersionCounters) {
  run_ranks(1, [](Rank& me) {
    at::Tensor t = zeros({4}, me.mesh("x=1"), {Shard(0)});
    const auto local = DTensor(t).to_local();
    const auto before = local._version(), outer = t._version();
    t.normal_();
    EXPECT_GT(local._version(), before);
    EXPECT_GT(t._version(), outer);
    auto plain = torch::zeros({4});
    random::normal_(plain);
    EXPECT_EQ(plain._version(), 1);
  });
}

TEST(Random, FillsAreOpsThatCanBeReplayed) {
  run_ranks(2, [](Rank& me) {
    manual_seed(1);
    at::Tensor t = zeros({5, 3}, me.mesh("x=2"), {Shard(0)});
    const at::Tensor x = rand({5, 3}, me.mesh("x=2"), {Shard(1)});
    testing::Recorder recorder;
    t.uniform_();
    const auto y = std::get<0>(at::native_dropout(x, 0.5, true));
    t.bernoulli_(0.5);
    recorder.stop();
    EXPECT_EQ(recorder.ops(), (std::vector<std::string>{"tessera::philox_uniform_", "tessera::philox_dropout",
                                                        "tessera::philox_bernoulli_"}));
    const auto once = DTensor(t).full_tensor().clone();
    t.zero_();
    recorder.replay();  // seed and offset are arguments of the ops, so the values are equal
    EXPECT_TRUE(same_bits(DTensor(t).full_tensor(), once));
  });
}

// ---- errors ----

TEST(RandomErrors, PartialGeneratorAndBadArguments) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    at::Tensor partial = DTensor::from_local(torch::ones({4}), mesh, {Partial()});
    const auto rejects_partial = [&](auto f) {
      const auto text = error_message<ShardingError>([&] { f(); });
      EXPECT_CONTAINS(text, "P(sum)");
      EXPECT_CONTAINS(text, "redistribute it to Replicate or Shard");
    };
    rejects_partial([&] { partial.uniform_(); });
    rejects_partial([&] { partial.normal_(); });
    rejects_partial([&] { partial.bernoulli_(0.5); });
    rejects_partial([&] { torch::rand_like(partial); });
    rejects_partial([&] { torch::bernoulli(partial); });
    rejects_partial([&] { at::native_dropout(partial, 0.5, true); });

    at::Tensor t = zeros({4}, mesh, {Shard(0)});
    const auto generator = at::make_generator<at::CPUGeneratorImpl>(1);
    EXPECT_CONTAINS(error_message<UsageError>([&] { t.uniform_(0, 1, generator); }), "tessera::manual_seed");
    EXPECT_CONTAINS(error_message<UsageError>([&] { torch::bernoulli(t, generator); }), "tessera::manual_seed");
    EXPECT_CONTAINS(error_message<UsageError>([&] { t.uniform_(2, 1); }), "give the lower bound first");
    EXPECT_CONTAINS(error_message<UsageError>([&] { t.normal_(0, -1); }), "std -1");
    EXPECT_CONTAINS(error_message<UsageError>([&] { t.bernoulli_(1.5); }), "between 0 and 1");
    EXPECT_CONTAINS(error_message<UsageError>([&] { t.random_(4, 4); }), "the range is empty");
    EXPECT_CONTAINS(error_message<UsageError>([&] { t.bernoulli_(torch::rand({4})); }), "distribute_tensor");
    EXPECT_EQ(me.world.random().offset, 0u);  // failed calls do not advance the generator
    EXPECT_TRUE(torch::equal(DTensor(t).full_tensor(), torch::zeros({4})));

    auto plain = torch::zeros({2}).requires_grad_();
    EXPECT_CONTAINS(error_message<UsageError>([&] { random::normal_(plain); }), "NoGradGuard");
  });
}

}  // namespace
}  // namespace tessera
