// Deferred modules with many placements: after materialize() the values are bitwise equal to those of one rank.
#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/nn/tiny_llama.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

using Named = std::vector<std::pair<std::string, at::Tensor>>;

Named tensors_of(const torch::nn::Module& module) {
  Named out;
  for (const auto& item : module.named_parameters()) out.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers()) out.emplace_back(item.key(), item.value());
  return out;
}

test::TinyLlama deferred_llama() {
  manual_seed(17);
  return deferred_init([] { return test::TinyLlama(test::LlamaSizes{}); });
}

// The tensors as one rank initializes them.
Named full_llama() {
  auto model = deferred_llama();
  materialize(model);
  auto out = tensors_of(*model);
  for (auto& [name, t] : out) t = t.detach();
  return out;
}

// The placements; Replicate() instead of a shard along a dim that the tensor does not have.
Placements fitting(const Placements& placements, const at::Tensor& t) {
  Placements out;
  for (const auto& p : placements) out.push_back(p.is_sharded() && p.dim >= t.dim() ? Replicate() : p);
  return out;
}

TEST(DeferredSharded, ValuesAreBitwiseEqualForAllPlacements) {
  const auto expected = full_llama();
  struct MeshCase {
    std::string mesh;
    int64_t ranks;
    std::vector<Placements> placements;
  };
  const std::vector<Placements> one_axis = {{Replicate()}, {Shard(0)}, {Shard(1)}, {StridedShard(0, 2)}};
  const MeshCase cases[] = {
      {"x=1", 1, one_axis},
      {"x=2", 2, one_axis},
      {"x=4", 4, one_axis},
      {"a=2,b=2",
       4,
       {{Replicate(), Replicate()},
        {Shard(0), Shard(1)},
        {Shard(0), Shard(0)},
        {Replicate(), Shard(0)},
        {Shard(1), Replicate()},
        {StridedShard(0, 2), Shard(0)}}},
  };
  for (const auto& c : cases)
    run_ranks(c.ranks, [&](Rank& me) {
      const auto mesh = me.mesh(c.mesh);
      for (const auto& placements : c.placements) {
        SCOPED_TRACE(c.mesh + " " + to_string(placements));
        auto model = deferred_llama();
        for (auto& [name, t] : tensors_of(*model)) distribute_in_place(t, mesh, fitting(placements, t));
        materialize(model);
        const auto got = tensors_of(*model);
        ASSERT_EQ(got.size(), expected.size());
        for (size_t i = 0; i < got.size(); i++) {
          const auto& [name, t] = got[i];
          EXPECT_TRUE(is_dtensor(t) && t.is_cpu() && t.is_leaf()) << name;
          EXPECT_EQ(t.requires_grad(), name != "rope" && name != "mask") << name;
          EXPECT_EQ(PlacementsRef(DTensor(t).placements()), PlacementsRef(fitting(placements, t))) << name;
          EXPECT_TRUE(torch::equal(DTensor(t.detach()).full_tensor(), expected[i].second)) << name;
        }
      }
    });
}

// Each op that runs on a local shard only must compute the same values as on the full tensor.
TEST(DeferredSharded, EveryOpThatRunsOnShards) {
  const auto fill = [](std::function<at::Tensor(at::Tensor)> f, at::ScalarType type = at::kFloat) {
    return [f = std::move(f), type] { return f(torch::rand({7, 13}, type)); };
  };
  const std::function<at::Tensor()> initializations[] = {
      fill([](at::Tensor t) { return (t * 3 + 1).sub(0.3).div(7).neg().abs(); }),
      fill([](at::Tensor t) { return t.mul_(2).sub_(1).div_(3).add_(0.1).clamp_(-0.2, 0.25).neg_().abs_(); }),
      fill([](at::Tensor t) { return t.mul(t.clone()).add(t).sub(torch::ones_like(t)).div(torch::full_like(t, 3)); }),
      fill([](at::Tensor t) {
        return t.mul_(t).add_(t).sub_(torch::zeros_like(t)).div_(torch::full({7, 13}, 3.0));
      }),
      fill([](at::Tensor t) { return t.mul(1.7).add_(0.1).div(3); }, at::kBFloat16),
      fill([](at::Tensor t) { return t.to(at::kBFloat16).clamp(0.1, 0.7).to(at::kDouble); }),
      fill([](at::Tensor t) {
        return torch::zeros({7, 13}).copy_(t.detach());
      }),
      fill([](at::Tensor t) { return torch::empty_like(t).normal_(1, 2).mul_(t); }),
      fill([](at::Tensor t) {
        t.select(0, 5).zero_();
        t[-1].mul_(2);
        t.select(1, 12).fill_(3);
        return t;
      }),
      [] {
        return torch::empty({7, 13}).exponential_(2);
      },
      [] {
        return torch::empty({7, 13}).cauchy_();
      },
      [] {
        return torch::empty({7, 13}).log_normal_();
      },
      [] {
        return torch::empty({7, 13}).geometric_(0.3);
      },
      [] {
        return torch::empty({7, 13}, at::kBool).bernoulli_(0.3);
      },
      [] {
        return torch::randint(-5, 100, {7, 13});
      },
      // These run on the full tensor.
      fill([](at::Tensor t) { return t.add(t, 0.7); }),
      fill([](at::Tensor t) { return t.erfinv_().mul_(std::sqrt(2.0)); }),
      fill([](at::Tensor t) { return t.cos() / t.sum(); }),
      fill([](at::Tensor t) { return t.slice(0, 0, 7).t().contiguous().t(); }),
      fill([](at::Tensor t) {
        t.slice(0, 1, 5, 2).fill_(1);
        return t;
      }),
      fill([](at::Tensor t) {
        t[2].uniform_();
        return t;
      }),
  };
  size_t number = 0;
  for (const auto& make : initializations) {
    SCOPED_TRACE(number++);
    struct OneBuffer : torch::nn::Module {
      at::Tensor value;
      explicit OneBuffer(const at::Tensor& t) { value = register_buffer("value", t); }
    };
    const auto build = [&] {
      manual_seed(2);
      return deferred_init([&] { return std::make_shared<OneBuffer>(make()); });
    };
    auto alone = build();
    materialize(*alone);
    run_ranks(3, [&](Rank& me) {
      for (const auto& p : {Shard(0), Shard(1), Replicate()}) {
        auto mine = build();
        distribute_in_place(mine->value, me.mesh("x=3"), {p});
        materialize(*mine);
        EXPECT_TRUE(torch::equal(DTensor(mine->value).full_tensor(), alone->value)) << to_string(p);
      }
    });
  }
}

TEST(DeferredSharded, DistributingDeferredTensorsDoesNotCommunicate) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    CommDebugMode comms;
    auto linear = deferred_init([] { return torch::nn::Linear(5, 3); });
    distribute_in_place(linear->weight, mesh, {Shard(0)});
    EXPECT_TRUE(is_deferred(linear->weight));
    EXPECT_EQ(linear->weight.sizes(), (at::IntArrayRef{3, 5}));
    EXPECT_EQ(DTensor(linear->weight.detach()).to_local().size(0), me.rank == 0 ? 2 : 1);
    // A redistribution without values does not communicate.
    linear->weight.set_data(DTensor(linear->weight.detach()).redistribute({Shard(1)}));
    EXPECT_TRUE(is_deferred(linear->weight));
    materialize(linear);
    EXPECT_EQ(PlacementsRef(DTensor(linear->weight).placements()), PlacementsRef({Shard(1)}));
    EXPECT_FALSE(is_dtensor(linear->bias));
    EXPECT_EQ(comms.get_total_counts(), 0);
  });
}

TEST(DeferredSharded, TrainsAfterMaterialize) {
  run_ranks(2, [](Rank& me) {
    manual_seed(3);
    auto linear = deferred_init([] { return torch::nn::Linear(4, 6); });
    torch::optim::SGD sgd(linear->parameters(), 0.5);  // created before materialize()
    for (auto& p : linear->parameters()) distribute_in_place(p, me.mesh("x=2"), {Shard(0)});
    materialize(linear);
    const auto before = DTensor(linear->bias.detach()).full_tensor().clone();
    const auto x = distribute_tensor(torch::ones({2, 4}), me.mesh("x=2"));
    linear(x).sum().backward();
    sgd.step();
    EXPECT_TRUE(torch::allclose(DTensor(linear->bias.detach()).full_tensor(), before - 1));
  });
}

TEST(DeferredSharded, TiedParametersShareMemory) {
  run_ranks(2, [](Rank& me) {
    struct Tied : torch::nn::Module {
      torch::nn::Embedding tokens{nullptr};
      torch::nn::Linear head{nullptr};
      Tied() {
        tokens = register_module("tokens", torch::nn::Embedding(5, 3));
        head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(3, 5).bias(false)));
        head->weight.set_data(tokens->weight);
      }
    };
    auto tied = deferred_init([] { return std::make_shared<Tied>(); });
    for (auto& p : tied->parameters()) distribute_in_place(p, me.mesh("x=2"), {Shard(0)});
    materialize(*tied);
    torch::NoGradGuard no_grad;
    tied->tokens->weight.fill_(2);
    EXPECT_TRUE(torch::equal(DTensor(tied->head->weight.detach()).full_tensor(), torch::full({5, 3}, 2.0)));
  });
}

TEST(DeferredSharded, Errors) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("x=2");
    auto linear = deferred_init([] { return torch::nn::Linear(4, 6); });
    for (auto& p : linear->parameters()) distribute_in_place(p, mesh, {Shard(0)});
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      torch::NoGradGuard no_grad;
                      linear->bias.fill_(1);
                    }),
                    "aten::fill_.Scalar on a tensor made in deferred_init");
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      deferred_init([&] {
                        torch::NoGradGuard no_grad;
                        linear->bias.fill_(1);
                      });
                    }),
                    "on a local shard, sizes [3], of a deferred tensor of sizes [6]");
    materialize(linear);
    EXPECT_CONTAINS(error_message<UsageError>([&] { materialize(linear); }),
                    "materialize(Linear): no tensor is deferred ('weight' has values");

    struct OneBuffer : torch::nn::Module {
      explicit OneBuffer(const at::Tensor& t) { register_buffer("value", t); }
    };
    auto inside = deferred_init([&] { return std::make_shared<OneBuffer>(zeros({6}, mesh, {Shard(0)})); });
    EXPECT_CONTAINS(error_message<UsageError>([&] { materialize(*inside); }),
                    "'value' has sizes [6] but was made with [3]. Create the full tensor inside deferred_init");

    torch::nn::Linear meta(torch::nn::LinearOptions(2, 2));
    meta->to(torch::kMeta);
    for (auto& p : meta->parameters()) distribute_in_place(p, mesh, {Shard(0)});
    EXPECT_FALSE(is_deferred(meta->weight));
    EXPECT_CONTAINS(error_message<UsageError>([&] { materialize(meta); }),
                    "'weight' is on the meta device but was not made in deferred_init");
  });
}

}  // namespace
}  // namespace tessera
