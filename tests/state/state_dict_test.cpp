#include "tessera/state/state_dict.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/state/load_state_dict.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/state/state_dict_helpers.h"

#include <torch/torch.h>

#include <sstream>

namespace tessera {
namespace {

using test::cloned;
using test::Names;
using testing::error_message;
using testing::Rank;
using testing::run_ranks;

// A module with a list of blocks, a norm with buffers, and one weight that has two names.
struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up{nullptr}, down{nullptr};
  BlockImpl() {
    up = register_module("up", torch::nn::Linear(4, 6));
    down = register_module("down", torch::nn::Linear(torch::nn::LinearOptions(6, 4).bias(false)));
  }
};
TORCH_MODULE(Block);

struct NetImpl : torch::nn::Module {
  torch::nn::ModuleList layers;
  torch::nn::BatchNorm1d norm{nullptr};
  torch::Tensor scale, tied;
  NetImpl() {
    layers = register_module("layers", torch::nn::ModuleList());
    layers->push_back(Block());
    layers->push_back(Block());
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    scale = register_parameter("scale", torch::ones({4}));
    tied = register_parameter("tied", layers[0]->as<BlockImpl>()->up->weight);
    register_buffer("mask", torch::ones({2}, torch::kBool));
  }
};
TORCH_MODULE(Net);

const Names kNetNames = {"scale",
                         "tied",
                         "mask",
                         "layers.0.up.weight",
                         "layers.0.up.bias",
                         "layers.0.down.weight",
                         "layers.1.up.weight",
                         "layers.1.up.bias",
                         "layers.1.down.weight",
                         "norm.weight",
                         "norm.bias",
                         "norm.running_mean",
                         "norm.running_var",
                         "norm.num_batches_tracked"};

bool equal(const StateDict& a, const StateDict& b) {
  if (a.names() != b.names()) return false;
  for (const auto& [name, t] : a)
    if (!t.equal(b.at(name))) return false;
  return true;
}

TEST(StateDict, KeepsTheOrderOfInsertionAndSuggestsNames) {
  StateDict dict{{"b", torch::ones({2, 3})}, {"a.x", torch::zeros({1}, torch::kLong)}};
  EXPECT_EQ(dict.names(), Names({"b", "a.x"}));
  EXPECT_EQ(dict.find("c"), nullptr);
  EXPECT_EQ(dict.at("b").size(1), 3);
  EXPECT_CONTAINS(error_message<UsageError>([&] { dict.at("a.y"); }), "no 'a.y' among 2 names; did you mean 'a.x'?");
  EXPECT_CONTAINS(error_message<UsageError>([&] { dict.insert("b", torch::ones({1})); }), "'b' exists already");
  EXPECT_CONTAINS(error_message<UsageError>([&] { dict.insert("u", torch::Tensor()); }), "'u' is undefined");

  std::ostringstream text;
  text << dict;
  EXPECT_EQ(text.str(), "b  Float[2, 3]\na.x  Long[1]\n");
  EXPECT_TRUE(dict.erase("b"));
  EXPECT_FALSE(dict.erase("b"));
  EXPECT_EQ(dict.at("a.x").numel(), 1);  // the index was updated

  StateDict both;
  both.insert_all("model.", dict);
  EXPECT_EQ(both.under("model.").names(), Names({"a.x"}));
  EXPECT_EQ(both.names(), Names({"model.a.x"}));
}

TEST(StateDict, UsesPyTorchsNames) {
  Net net;
  const auto dict = state_dict(*net);
  EXPECT_EQ(dict.names(), kNetNames);
  EXPECT_FALSE(dict.at("scale").requires_grad());
  EXPECT_TRUE(dict.at("tied").is_alias_of(dict.at("layers.0.up.weight")));
  {
    torch::NoGradGuard no_grad;
    net->scale.fill_(7);
  }
  EXPECT_EQ(dict.at("scale")[0].item<float>(), 7);  // an alias
}

TEST(LoadStateDict, CopiesAllValues) {
  Net from, to;
  from->norm->running_mean.fill_(3);
  const auto report = load_state_dict(*to, state_dict(*from));
  EXPECT_TRUE(report.empty()) << report;
  EXPECT_TRUE(equal(state_dict(*to), state_dict(*from)));
  EXPECT_FALSE(to->scale.is_alias_of(from->scale));
  EXPECT_TRUE(to->scale.requires_grad());
  EXPECT_TRUE(to->tied.is_same(to->layers[0]->as<BlockImpl>()->up->weight));
}

TEST(LoadStateDict, StrictReportsEveryMismatchAndChangesNothing) {
  Net net;
  auto dict = cloned(state_dict(*Net()));
  dict.erase("layers.1.up.bias");
  dict.insert("layers.1.up.bais", torch::zeros({6}));
  dict.erase("norm.weight");
  dict.insert("norm.weight", torch::zeros({5}));
  const auto before = cloned(state_dict(*net));
  const auto said = error_message<UsageError>([&] { load_state_dict(*net, dict); });
  EXPECT_CONTAINS(said, "does not fit");
  EXPECT_CONTAINS(said, "Net; nothing was loaded");
  EXPECT_CONTAINS(said, "missing from the dict: layers.1.up.bias");
  EXPECT_CONTAINS(said, "no layers.1.up.bais; did you mean 'layers.1.up.bias'?");
  EXPECT_CONTAINS(said, "wrong shape: norm.weight of BatchNorm1d is [4] in the module and [5] in the dict");
  EXPECT_TRUE(equal(state_dict(*net), before));

  // A value on the meta device throws even if strict is false.
  dict.erase("scale");
  dict.insert("scale", torch::empty({4}, torch::kMeta));
  EXPECT_CONTAINS(error_message<UsageError>([&] { load_state_dict(*net, dict, {.strict = false}); }),
                  "the value is on the meta device");
  EXPECT_TRUE(equal(state_dict(*net), before));
}

TEST(LoadStateDict, WithoutStrictLoadsTheRestAndReports) {
  Net net;
  const StateDict dict{
      {"scale", torch::full({4}, 5.0, torch::kDouble)}, {"norm.bias", torch::ones({3})}, {"other", torch::ones({1})}};
  const auto report = load_state_dict(*net, dict, {.strict = false});
  EXPECT_TRUE(net->scale.equal(torch::full({4}, 5.0F)));  // converted to float
  EXPECT_TRUE(net->norm->bias.equal(torch::zeros({4})));
  EXPECT_EQ(report.unexpected, Names({"other"}));
  EXPECT_EQ(report.mismatched, (std::vector<LoadReport::Mismatch>{{"norm.bias", {4}, {3}}}));
  EXPECT_EQ(report.missing.size(), kNetNames.size() - 2);
}

TEST(LoadStateDict, AssignUsesTheTensorOfTheDict) {
  torch::nn::Linear linear(2, 3);
  const auto weight = linear->weight;  // another handle
  const StateDict dict{{"weight", torch::ones({3, 2}, torch::kDouble)}, {"bias", torch::ones({3})}};
  load_state_dict(*linear, dict, {.assign = true});
  EXPECT_TRUE(linear->weight.is_alias_of(dict.at("weight")));
  EXPECT_EQ(weight.scalar_type(), torch::kDouble);
  EXPECT_TRUE(linear->weight.requires_grad());
}

TEST(LoadStateDict, AllocatesAParameterOnMeta) {
  torch::nn::Linear linear(2, 3);
  const auto weight = linear->weight;
  linear->weight.unsafeGetTensorImpl()->shallow_copy_from(
      torch::empty({3, 2}, torch::TensorOptions(torch::kMeta).dtype(torch::kDouble)).getIntrusivePtr());
  ASSERT_TRUE(linear->weight.is_meta());
  const StateDict dict{{"weight", torch::ones({3, 2})}, {"bias", torch::zeros({3})}};
  load_state_dict(*linear, dict);
  EXPECT_FALSE(weight.is_meta());
  EXPECT_TRUE(weight.equal(torch::ones({3, 2}, torch::kDouble)));  // in its own dtype
  linear->bias.set_data(linear->bias.to(torch::kDouble));
  linear->forward(torch::ones({1, 2}, torch::kDouble)).sum().backward();
  EXPECT_TRUE(weight.grad().defined());
}

// All pairs of plain and distributed tensors, with sizes that are not divisible by the number of ranks.
TEST(LoadStateDict, KeepsThePlacementsOfTheParameter) {
  for (int64_t n : {1, 2, 3})
    run_ranks(n, [](Rank& me) {
      const auto mesh = me.mesh(c10::str("tp=", me.size()));
      const auto value = torch::arange(15, torch::kFloat).view({5, 3});
      const std::vector<Placements> all{{Replicate()}, {Shard(0)}, {Shard(1)}};
      for (const auto& to : all) {
        for (const auto& from : all) {
          torch::nn::Linear linear(torch::nn::LinearOptions(3, 5).bias(false));
          distribute_in_place(linear->weight, mesh, to);
          load_state_dict(*linear, {{"weight", distribute_tensor(value, mesh, from)}});
          EXPECT_EQ(DTensor(linear->weight).placements(), PlacementsRef(to));
          EXPECT_TRUE(DTensor(linear->weight).full_tensor().equal(value));
        }
        torch::nn::Linear linear(torch::nn::LinearOptions(3, 5).bias(false));
        distribute_in_place(linear->weight, mesh, to);
        load_state_dict(*linear, {{"weight", value.to(torch::kDouble)}});
        EXPECT_EQ(DTensor(linear->weight).placements(), PlacementsRef(to));
        EXPECT_EQ(linear->weight.scalar_type(), torch::kFloat);
        EXPECT_TRUE(DTensor(linear->weight).full_tensor().equal(value));

        torch::nn::Linear plain(torch::nn::LinearOptions(3, 5).bias(false));
        load_state_dict(*plain, state_dict(*linear));
        EXPECT_TRUE(plain->weight.equal(value));
      }
    });
}

TEST(LoadStateDict, AllocatesTheLocalShardOfADistributedParameterOnMeta) {
  run_ranks(2, [](Rank& me) {
    torch::nn::Linear linear(torch::nn::LinearOptions(3, 4).bias(false));
    linear->weight.set_data(
        DTensor::from_local(torch::empty({2, 3}, torch::kMeta), me.mesh("tp=2"), PlacementsRef({Shard(0)})));
    ASSERT_TRUE(linear->weight.is_meta());
    const auto value = torch::arange(12, torch::kDouble).view({4, 3});
    load_state_dict(*linear, {{"weight", value}});
    EXPECT_EQ(DTensor(linear->weight).placements(), PlacementsRef({Shard(0)}));
    EXPECT_TRUE(DTensor(linear->weight).full_tensor().equal(value.to(torch::kFloat)));
    EXPECT_TRUE(linear->weight.requires_grad());
  });
}

// Each rank copies its local shard of a plain value.
TEST(LoadStateDict, LoadingAPlainValueDoesNotCommunicate) {
  run_ranks(2, [](Rank& me) {
    torch::nn::Linear linear(torch::nn::LinearOptions(3, 4).bias(false));
    distribute_in_place(linear->weight, me.mesh("tp=2"), {Shard(0)});
    if (me.rank == 0) load_state_dict(*linear, {{"weight", torch::ones({4, 3})}});  // rank 1 does not call it
    EXPECT_EQ(DTensor(linear->weight).to_local().eq(1).all().item<bool>(), me.rank == 0);
  });
}

TEST(LoadStateDict, ErrorsContainGlobalSizes) {
  run_ranks(2, [](Rank& me) {
    torch::nn::Linear linear(3, 4);
    distribute_in_place(linear->weight, me.mesh("tp=2"), {Shard(0)});
    EXPECT_CONTAINS(error_message<UsageError>([&] {
                      load_state_dict(*linear, {{"weight", torch::ones({2, 3})}, {"bias", torch::ones({4})}});
                    }),
                    "weight of Linear is [4, 3] in the module and [2, 3] in the dict");
    std::ostringstream text;
    text << state_dict(*linear);
    EXPECT_CONTAINS(text.str(), "weight  Float[4, 3] [S(0)] on mesh(tp=2)\n");
  });
}

}  // namespace
}  // namespace tessera
