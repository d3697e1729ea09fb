#include "tessera/state/optimizer_state.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/state/state_dict_helpers.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace tessera {
namespace {

using OptimizerRef = std::shared_ptr<torch::optim::Optimizer>;
using test::cloned;
using test::Names;
using testing::error_message;
using testing::Rank;
using testing::run_ranks;

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(3, 5), torch::nn::Tanh(), torch::nn::Linear(5, 2));
}

torch::Tensor full(const torch::Tensor& t) { return is_dtensor(t) ? DTensor(t).full_tensor() : t.detach().clone(); }

void step(torch::nn::Sequential& net, torch::optim::Optimizer& optimizer, int64_t number) {
  optimizer.zero_grad();
  auto x = torch::arange(12, torch::kFloat).view({4, 3}) / (10 + number);
  if (is_dtensor(net->parameters()[0])) x = distribute_tensor(x, DTensor(net->parameters()[0]).device_mesh());
  net->forward(x).pow(2).sum().backward();
  optimizer.step();
}

struct Case {
  std::string name;
  std::function<OptimizerRef(std::vector<torch::Tensor>)> make, make_default;
  Names entries;  // the state of a parameter after a step
};

template <class Optimizer, class Options>
Case make_case(std::string name, Options options, Options other, Names entries) {
  return {std::move(name), [=](auto parameters) { return std::make_shared<Optimizer>(parameters, options); },
          [=](auto parameters) { return std::make_shared<Optimizer>(parameters, other); }, std::move(entries)};
}

std::vector<Case> cases() {
  using namespace torch::optim;
  return {
      make_case<SGD>("SGD", SGDOptions(0.1), SGDOptions(1), {}),
      make_case<SGD>("SGD with momentum", SGDOptions(0.1).momentum(0.9).nesterov(true), SGDOptions(1),
                     {"momentum_buffer"}),
      make_case<Adam>("Adam", AdamOptions(0.1).betas({0.8, 0.95}), AdamOptions(1), {"step", "exp_avg", "exp_avg_sq"}),
      make_case<AdamW>("AdamW", AdamWOptions(0.1).amsgrad(true).weight_decay(0.3), AdamWOptions(1),
                       {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
      make_case<RMSprop>("RMSprop", RMSpropOptions(0.1).centered(true).momentum(0.5), RMSpropOptions(1),
                         {"step", "square_avg", "momentum_buffer", "grad_avg"}),
      make_case<Adagrad>("Adagrad", AdagradOptions(0.1).lr_decay(0.01), AdagradOptions(1), {"step", "sum"}),
  };
}

// Saves after two steps and loads into a new net and an optimizer with other options. The third step must be bitwise
// equal.
TEST(OptimizerState, AfterSaveAndLoadTheNextStepIsBitwiseEqual) {
  for (const auto& c : cases()) {
    SCOPED_TRACE(c.name);
    auto net = make_net();
    auto optimizer = c.make(net->parameters());
    for (int64_t s : {0, 1}) step(net, *optimizer, s);
    const auto model = cloned(state_dict(*net)), state = cloned(optimizer_state_dict(*optimizer, *net));
    step(net, *optimizer, 2);

    EXPECT_EQ(state.under("state.0.weight.").names(), c.entries);

    auto again = make_net();
    auto other = c.make_default(again->parameters());
    EXPECT_TRUE(load_state_dict(*again, model).empty());
    EXPECT_TRUE(load_optimizer_state_dict(*other, *again, state).empty());
    EXPECT_EQ(optimizer_state_dict(*other, *again).names(), state.names());
    const auto loaded = cloned(state);
    step(again, *other, 2);
    for (const auto& [name, t] : state) EXPECT_TRUE(t.equal(loaded.at(name))) << name;  // the optimizer has copies
    for (size_t i = 0; i < net->parameters().size(); i++)
      EXPECT_TRUE(net->parameters()[i].equal(again->parameters()[i])) << i;
  }
}

TEST(OptimizerState, KeysUseParameterNamesAndGroupNumbers) {
  auto net = make_net();
  const auto p = net->parameters();
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto options = [](double lr) {
    return std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(lr).momentum(0.9));
  };
  groups.emplace_back(std::vector<torch::Tensor>{p[2]}, options(0.5));
  groups.emplace_back(std::vector<torch::Tensor>{p[1]}, options(0.25));
  torch::optim::SGD optimizer(groups, *options(0.5));
  step(net, optimizer, 0);
  const auto dict = optimizer_state_dict(optimizer, *net);
  EXPECT_EQ(dict.under("state.").names(), Names({"2.weight.momentum_buffer", "0.bias.momentum_buffer"}));
  EXPECT_EQ(dict.at("param_groups.1.lr").item<double>(), 0.25);
  EXPECT_EQ(dict.under("param_groups.0.").names(), Names({"lr", "momentum", "dampening", "weight_decay", "nesterov"}));
}

// Saves on one rank, loads on two ranks with several placements, and loads back on one rank.
TEST(OptimizerState, LoadsIntoOtherPlacements) {
  auto net = make_net();
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.1));
  step(net, optimizer, 0);
  const auto model = cloned(state_dict(*net)), state = cloned(optimizer_state_dict(optimizer, *net));
  step(net, optimizer, 1);
  const auto expected = cloned(state_dict(*net));

  run_ranks(2, [&](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    auto distributed = [&](const Placement& weights) {
      auto m = make_net();
      for (auto& p : m->parameters()) distribute_in_place(p, mesh, {p.dim() == 2 ? weights : Replicate()});
      return m;
    };
    auto columns = distributed(Shard(1)), rows = distributed(Shard(0));
    torch::optim::AdamW first(columns->parameters(), torch::optim::AdamWOptions(1)), second(rows->parameters());
    load_state_dict(*columns, model);
    load_optimizer_state_dict(first, *columns, state);
    EXPECT_EQ(DTensor(optimizer_state_dict(first, *columns).at("state.0.weight.exp_avg")).placements(),
              PlacementsRef({Shard(1)}));
    load_state_dict(*rows, state_dict(*columns));
    load_optimizer_state_dict(second, *rows, optimizer_state_dict(first, *columns));
    EXPECT_EQ(DTensor(optimizer_state_dict(second, *rows).at("state.0.weight.exp_avg")).placements(),
              PlacementsRef({Shard(0)}));
    step(rows, second, 1);
    for (const auto& [name, t] : state_dict(*rows))
      EXPECT_TRUE(full(t).allclose(expected.at(name), 1e-5, 1e-6)) << name;

    auto alone = make_net();
    torch::optim::AdamW third(alone->parameters());
    load_optimizer_state_dict(third, *alone, optimizer_state_dict(first, *columns));
    const auto back = optimizer_state_dict(third, *alone);
    for (const auto& [name, t] : state) EXPECT_TRUE(back.at(name).equal(t)) << name;
  });
}

TEST(OptimizerState, StrictReportsEveryMismatchAndChangesNothing) {
  auto net = make_net();
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
  step(net, optimizer, 0);
  const auto before = cloned(optimizer_state_dict(optimizer, *net));
  auto dict = cloned(before);
  dict.erase("state.0.weight.step");
  dict.erase("state.2.bias.exp_avg");
  dict.insert("state.2.bias.exp_avg", torch::ones({7}));
  dict.insert("state.5.bias.exp_avg", torch::ones({7}));
  dict.insert("state.0.bias.momentum", torch::ones({5}));
  dict.insert("param_groups.1.lr", torch::ones({}));
  dict.erase("param_groups.0.eps");
  const auto said = error_message<UsageError>([&] { load_optimizer_state_dict(optimizer, *net, dict); });
  EXPECT_CONTAINS(said, "does not fit this Adam of 1 groups");
  EXPECT_CONTAINS(said, "missing state.0.weight.step");
  EXPECT_CONTAINS(said, "missing param_groups.0.eps");
  EXPECT_CONTAINS(said, "unexpected state.5.bias.exp_avg");
  EXPECT_CONTAINS(said, "unexpected state.0.bias.momentum");
  EXPECT_CONTAINS(said, "unexpected param_groups.1.lr");
  EXPECT_CONTAINS(said, "mismatched state.2.bias.exp_avg expected [2] found [7]");
  auto unchanged = [&](const std::string& name) {
    return optimizer_state_dict(optimizer, *net).at(name).equal(before.at(name));
  };
  for (const auto& [name, t] : before) EXPECT_TRUE(unchanged(name)) << name;

  // Not strict: loads only the parameters whose state is complete.
  dict.at("state.0.bias.exp_avg").fill_(9);
  dict.at("state.0.weight.exp_avg").fill_(9);
  dict.at("param_groups.0.lr").fill_(0.75);
  EXPECT_EQ(load_optimizer_state_dict(optimizer, *net, dict, {.strict = false}).mismatched.size(), 1U);
  EXPECT_FALSE(unchanged("state.0.bias.exp_avg"));
  EXPECT_FALSE(unchanged("param_groups.0.lr"));
  EXPECT_TRUE(unchanged("state.0.weight.exp_avg"));
  EXPECT_TRUE(unchanged("state.2.bias.exp_avg"));
}

TEST(OptimizerState, LoadingADictWithoutStateRemovesTheState) {
  auto net = make_net();
  torch::optim::Adam optimizer(net->parameters());
  const auto fresh = optimizer_state_dict(optimizer, *net);
  step(net, optimizer, 0);
  EXPECT_FALSE(optimizer_state_dict(optimizer, *net).under("state.").empty());
  load_optimizer_state_dict(optimizer, *net, fresh);
  EXPECT_TRUE(optimizer_state_dict(optimizer, *net).under("state.").empty());
}

TEST(OptimizerState, UnknownOptimizersAndModulesThrow) {
  auto net = make_net();
  torch::optim::LBFGS lbfgs(net->parameters());
  EXPECT_CONTAINS(error_message<UsageError>([&] { optimizer_state_dict(lbfgs, *net); }),
                  "Adagrad, Adam, AdamW, RMSprop, SGD");
  torch::optim::SGD sgd(net->parameters(), 0.1);
  EXPECT_CONTAINS(error_message<UsageError>([&] { optimizer_state_dict(sgd, *torch::nn::Linear(1, 1)); }),
                  "parameter 0 of group 0 of this SGD, of sizes [5, 3], is not in Linear");
}

// A user-defined optimizer, with one number and one tensor per parameter.
struct Signs : torch::optim::SGD, OptimizerAccess {
  explicit Signs(torch::Tensor p) : torch::optim::SGD({p}, 0.1), parameter(p), mean(torch::zeros_like(p)) {}
  torch::Tensor parameter, mean;
  double rate = 0.5;
  std::string kind() const override { return "Signs"; }
  std::vector<std::vector<at::Tensor>> groups() const override { return {{parameter}}; }
  StateDict options(size_t) const override { return {{"rate", torch::tensor(rate, torch::kDouble)}}; }
  void set_options(size_t, const StateDict& o) override { rate = o.at("rate").item<double>(); }
  std::vector<StateEntry> state_entries() const override { return {{"mean"}}; }
  StateDict state(const at::Tensor&) const override { return {{"mean", mean.detach()}}; }
  void set_state(const at::Tensor&, StateDict state) override { mean = state.at("mean"); }
};

TEST(OptimizerState, AUserDefinedOptimizerIsSavedAndLoaded) {
  torch::nn::Linear linear(torch::nn::LinearOptions(2, 2).bias(false));
  Signs signs(linear->weight);
  torch::optim::Optimizer& optimizer = signs;
  EXPECT_EQ(optimizer_state_dict(optimizer, *linear).names(), Names({"state.weight.mean", "param_groups.0.rate"}));
  load_optimizer_state_dict(
      optimizer, *linear,
      {{"state.weight.mean", torch::ones({2, 2})}, {"param_groups.0.rate", torch::tensor(0.25, torch::kDouble)}});
  EXPECT_EQ(signs.rate, 0.25);
  EXPECT_TRUE(signs.mean.equal(torch::ones({2, 2})));
  load_optimizer_state_dict(signs, *linear, cloned(optimizer_state_dict(signs, *linear)));
}

}  // namespace
}  // namespace tessera
