// Optimizers on plain and distributed parameters: equal values, no communication, versions, state, errors.
#include "tessera/base/error.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/policy.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/detail/host_reads.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/full_tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>

namespace tessera::optim {
namespace {

using testing::error_message;
using testing::HostReadCounter;
using testing::Rank;
using testing::run_ranks;

struct OptimizerCase {
  std::string name;
  std::function<std::unique_ptr<Optimizer>(Tensors)> make;
};
template <class Kind>
void add(std::vector<OptimizerCase>& cases, const std::string& name, typename Kind::Options options) {
  const struct {
    const char* name;
    std::optional<bool> foreach;
    bool fused;
  } implementations[] = {{" loop", false, false}, {" foreach", true, false}, {" fused", {}, true}};
  for (const auto& each : implementations) {
    options.foreach = each.foreach;
    options.fused = each.fused;
    cases.push_back({name + each.name, [options](Tensors params) { return std::make_unique<Kind>(params, options); }});
  }
}
std::vector<OptimizerCase> cases() {
  std::vector<OptimizerCase> all;
  add<SGD>(all, "SGD", {.lr = 0.1, .weight_decay = 0.1});
  add<SGD>(all, "SGD momentum", {.lr = 0.1, .momentum = 0.9, .nesterov = true});
  add<Adam>(all, "Adam", {.lr = 0.01, .weight_decay = 0.1, .maximize = true});
  add<AdamW>(all, "AdamW", {.lr = 0.01, .amsgrad = true});
  add<AdamW>(all, "AdamW tensor lr", {.lr = torch::tensor(0.01)});
  add<Adagrad>(all, "Adagrad", {.lr = 0.1, .lr_decay = 0.1, .weight_decay = 0.1, .initial_accumulator_value = 0.2});
  const auto rmsprop = [&](const std::string& name, RMSprop::Options options) {
    for (const bool foreach : {false, true}) {
      options.foreach = foreach;
      all.push_back({name + (foreach ? " foreach" : " loop"),
                     [options](Tensors params) { return std::make_unique<RMSprop>(params, options); }});
    }
  };
  rmsprop("RMSprop", {.lr = 0.01, .weight_decay = 0.1, .maximize = true});
  rmsprop("RMSprop momentum", {.lr = 0.01, .momentum = 0.9});
  rmsprop("RMSprop centered", {.lr = torch::tensor(0.01), .momentum = 0.9, .centered = true});
  return all;
}

const std::vector<std::vector<int64_t>> kShapes = {{5, 4}, {7}, {3, 2}, {4, 4}, {1}};

torch::Tensor value(size_t i, double shift = 0) {
  const auto numel = c10::multiply_integers(kShapes[i]);
  return torch::sin(torch::arange(numel, torch::kFloat) + (static_cast<double>(i) + shift)).view(kShapes[i]);
}
Tensors plain_parameters() {
  Tensors all;
  for (size_t i = 0; i < kShapes.size(); i++) all.push_back(value(i).requires_grad_());
  return all;
}
void set_plain_gradients(const Tensors& params, int64_t step) {
  for (size_t i = 0; i < params.size(); i++) params[i].mutable_grad() = value(i, static_cast<double>(step) + 0.5);
}

// Different meshes and placements; uneven local tensors, some empty; one plain tensor.
struct MeshPlacements {
  DeviceMesh mesh;
  Placements placements;
};
std::vector<MeshPlacements> layouts(const Rank& me) {
  const auto n = me.size();
  const auto line = me.mesh({n}, {"tp"});
  const auto grid = n == 4 ? me.mesh("dp=2,tp=2") : me.mesh({1, n}, {"dp", "tp"});
  return {{line, {Shard(0)}}, {line, {Replicate()}}, {grid, {Shard(0), Shard(1)}}, {}, {grid, {Replicate(), Shard(0)}}};
}
torch::Tensor distribute(const torch::Tensor& t, const MeshPlacements& layout) {
  return layout.mesh ? at::Tensor(distribute_tensor(t, layout.mesh, layout.placements, {.src_data_rank = {}})) : t;
}

Tensors distributed_parameters(const std::vector<MeshPlacements>& layouts) {
  Tensors all;
  for (size_t i = 0; i < kShapes.size(); i++) all.push_back(distribute(value(i), layouts[i]).detach().requires_grad_());
  return all;
}
void set_gradients(const Tensors& params, const std::vector<MeshPlacements>& layouts, int64_t step) {
  for (size_t i = 0; i < params.size(); i++)
    params[i].mutable_grad() = distribute(value(i, static_cast<double>(step) + 0.5), layouts[i]);
}

TEST(Optimizer, DistributedParametersGetTheValuesOfPlainOnesWithoutCommunication) {
  for (const int64_t n : {1, 2, 4})
    run_ranks(n, [&](Rank& me) {
      for (const auto& one : cases()) {
        const auto expected = plain_parameters();
        const auto reference = one.make(expected);
        const auto placed = layouts(me);
        const auto params = distributed_parameters(placed);
        const auto optimizer = one.make(params);
        for (int64_t step = 0; step < 3; step++) {
          set_plain_gradients(expected, step);
          set_gradients(params, placed, step);
          reference->step();
          const CommPolicyScope strict(CommPolicy::Error);
          CommDebugMode mode;
          optimizer->step();
          EXPECT_EQ(mode.get_total_counts(), 0) << one.name << "\n" << mode.debug_string();
        }
        for (size_t i = 0; i < params.size(); i++) {
          EXPECT_TRUE(torch::allclose(fixtures::full_tensor(params[i]), expected[i], 1e-6, 1e-7))
              << one.name << " " << i;
          for (const auto& [name, t] : optimizer->state(params[i]))
            EXPECT_EQ(is_dtensor(t), name != "step" && is_dtensor(params[i])) << one.name << " " << name;
        }
      }
    });
}

// A Partial gradient, and one with other placements than its parameter.
TEST(Optimizer, GradientsAreRedistributedToTheirParametersPlacements) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    for (const auto& one : cases()) {
      const Tensors expected{value(0).requires_grad_(), value(0).requires_grad_()};
      const Tensors params{distribute_tensor(value(0), mesh, {Shard(0)}).detach().requires_grad_(),
                           distribute_tensor(value(0), mesh, {Replicate()}).detach().requires_grad_()};
      for (size_t i = 0; i < 2; i++) expected[i].mutable_grad() = value(0, 0.5) * 3;
      const auto local = value(0, 0.5) * static_cast<double>(me.rank + 1);  // 1 + 2 = 3
      params[0].mutable_grad() = DTensor::from_local(local, mesh, {Partial()});
      params[1].mutable_grad() = distribute_tensor(value(0, 0.5) * 3, mesh, {Shard(1)});
      one.make(expected)->step();
      const CommPolicyScope strict(CommPolicy::Error);
      CommDebugMode mode;
      one.make(params)->step();
      mode.exit();
      EXPECT_EQ(mode.get_total_counts(), 2) << one.name << mode.debug_string();
      for (size_t i = 0; i < 2; i++)
        EXPECT_TRUE(torch::allclose(fixtures::full_tensor(params[i]), expected[i], 1e-6, 1e-6)) << one.name << i;
    }
  });
}

TEST(Optimizer, StepBumpsVersions) {
  run_ranks(1, [](Rank& me) {
    const auto mesh = me.mesh("tp=1");
    for (const auto& one : cases()) {
      const Tensors params{value(0).requires_grad_(),
                           at::Tensor(distribute_tensor(value(0), mesh, {Shard(0)})).detach().requires_grad_()};
      for (const auto& p : params) p.mutable_grad() = torch::ones_like(p);
      const auto optimizer = one.make(params);
      optimizer->step();
      const std::vector<int64_t> before{params[0]._version(), params[1]._version(),
                                        tessera::detail::local_of(params[1])._version()};
      const auto saved = (params[1] * params[1]).sum();  // backward needs the parameter as it is now
      optimizer->step();
      EXPECT_GT(params[0]._version(), before[0]) << one.name;
      EXPECT_GT(params[1]._version(), before[1]) << one.name;
      EXPECT_GT(tessera::detail::local_of(params[1])._version(), before[2]) << one.name;
      EXPECT_THROW(saved.backward(), c10::Error) << one.name;
    }
  });
}

TEST(Optimizer, StepCopiesNothingToTheHost) {
  run_ranks(2, [](Rank& me) {
    const auto placed = layouts(me);
    for (const auto& one : cases()) {
      const auto params = distributed_parameters(placed);
      const auto optimizer = one.make(params);
      for (int64_t step = 0; step < 2; step++) {
        set_gradients(params, placed, step);
        HostReadCounter mode;
        const OpModeScope on(mode);
        clip_grad_norm_(params, 0.1);
        clip_grad_value_(params, 0.1);
        optimizer->step();
        EXPECT_GT(mode.ops, 0);
        EXPECT_EQ(mode.reads, 0) << one.name;
      }
    }
    HostReadCounter mode;  // detects a read
    const OpModeScope on(mode);
    torch::ones(1).item<float>();
    EXPECT_EQ(mode.reads, 1);
  });
}

TEST(Optimizer, ParametersWithoutGradientAreSkipped) {
  for (const auto& one : cases()) {
    auto params = plain_parameters();
    const auto optimizer = one.make(params);
    set_plain_gradients(params, 0);
    params[1].mutable_grad().reset();
    optimizer->step();
    EXPECT_TRUE(torch::equal(params[1], value(1))) << one.name;
    EXPECT_TRUE(optimizer->state(params[1]).empty()) << one.name;
    // Its first step is the second step of the others.
    set_plain_gradients(params, 1);
    optimizer->step();
    const auto alone = value(1).requires_grad_();
    const auto reference = one.make({alone});
    alone.mutable_grad() = value(1, 1.5);
    reference->step();
    EXPECT_TRUE(torch::equal(params[1], alone)) << one.name;
  }
}

// After one optimizer loads the state of the other, both continue equally, also with other placements.
TEST(Optimizer, StateIsSavedAndLoadedByName) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    const auto make_net = [&](int64_t dim) {
      torch::manual_seed(3);
      torch::nn::Linear net(4, 6);
      if (dim >= 0) distribute_in_place(net->weight, mesh, {Shard(dim)});
      return net;
    };
    const auto set_gradients = [&](torch::nn::Linear& net, double number) {
      for (auto& p : net->parameters()) {
        const auto g = torch::sin(torch::arange(p.numel(), torch::kFloat) * number).view(p.sizes());
        p.mutable_grad() = is_dtensor(p) ? at::Tensor(distribute_tensor(g, mesh, DTensor(p).placements())) : g;
      }
    };
    for (const auto& one : cases())
      for (const int64_t dim : {-1, 0, 1}) {
        auto net = make_net(0), other = make_net(dim);
        const auto optimizer = one.make(net->parameters()), loaded = one.make(other->parameters());
        loaded->set_lr(0, 7);
        for (const double number : {1., 2.}) {
          set_gradients(net, number);
          optimizer->step();
        }
        load_state_dict(*other, state_dict(*net));
        load_optimizer_state_dict(*loaded, *other, optimizer_state_dict(*optimizer, *net));
        set_gradients(net, 3);
        set_gradients(other, 3);
        optimizer->step();
        loaded->step();
        EXPECT_TRUE(torch::equal(fixtures::full_tensor(net->weight), fixtures::full_tensor(other->weight)))
            << one.name << " " << dim;
        EXPECT_TRUE(torch::equal(net->bias, other->bias)) << one.name;
      }
  });
}

// Loaded options are checked like constructor arguments: all groups before any change.
TEST(Optimizer, LoadedOptionsAreChecked) {
  torch::nn::Linear net(3, 2);
  const auto rate = torch::tensor(0.5);
  AdamW optimizer({{{net->weight}, {.lr = rate}}, {{net->bias}, {.lr = 0.5}}});
  net->forward(torch::ones({1, 3})).sum().backward();
  optimizer.step();
  const auto saved = optimizer_state_dict(optimizer, *net);
  // A copy of `saved` with another learning rate of group 0, another step count, and `changed` replaced.
  const auto with = [&](const std::string& changed, const torch::Tensor& to) {
    StateDict dict;
    for (const auto& [name, value] : saved) dict.insert(name, name == changed ? to : value.clone());
    if (changed != "param_groups.0.lr") dict.at("param_groups.0.lr").fill_(0.25);
    dict.at("state.weight.step").fill_(7);
    return dict;
  };
  const auto number = [](double value) { return torch::tensor(value, torch::kDouble); };
  const std::tuple<const char*, torch::Tensor, const char*> kBad[] = {
      {"param_groups.1.lr", number(-1), "AdamW: lr must be at least 0; found -1"},
      {"param_groups.1.betas", torch::tensor({0.9, 1.5}, torch::kDouble), "found 0.9 and 1.5"},
      {"param_groups.0.eps", number(-1), "eps"},
      {"param_groups.0.weight_decay", number(std::nan("")), "found nan"},
  };
  for (const auto& [name, value, message] : kBad) {
    EXPECT_ERROR(UsageError, load_optimizer_state_dict(optimizer, *net, with(name, value)), message);
    EXPECT_EQ(optimizer.state(net->weight).at("step").item<double>(), 1) << name;
    EXPECT_EQ(rate.item<double>(), 0.5) << name;
    EXPECT_EQ(optimizer.group_options(1).betas[1], 0.999) << name;
  }
  load_optimizer_state_dict(optimizer, *net, with("param_groups.1.lr", number(0.125)));
  EXPECT_EQ(rate.item<double>(), 0.25);  // the same tensor, written in place
  EXPECT_TRUE(optimizer.group_options(0).lr.tensor_itself().is_same(rate));
  EXPECT_EQ(optimizer.lr(1), 0.125);
  EXPECT_EQ(optimizer.state(net->weight).at("step").item<double>(), 7);
}

TEST(Optimizer, LoadsTheStateOfTorchAdamW) {
  torch::nn::Linear net(3, 2), other(3, 2);
  torch::optim::AdamW theirs(net->parameters(), torch::optim::AdamWOptions(0.1));
  AdamW ours(other->parameters());
  net->forward(torch::ones({1, 3})).sum().backward();
  theirs.step();
  load_optimizer_state_dict(ours, *other, optimizer_state_dict(theirs, *net), {.strict = false});
  const auto step = ours.state(other->weight).at("step");
  EXPECT_EQ(step.scalar_type(), torch::kFloat);
  EXPECT_EQ(step.item<double>(), 1);
  EXPECT_EQ(ours.lr(0), 0.1);
}

TEST(Optimizer, EachGroupHasItsOwnOptions) {
  auto a = torch::ones(2, torch::requires_grad()), b = torch::ones(2, torch::requires_grad());
  SGD optimizer({{{a}, {.lr = 0.5}}, {{b}, {.lr = 0.25}}});
  auto c = torch::ones(2, torch::requires_grad());
  optimizer.add_param_group({{c}, {.lr = 1}});
  for (auto& p : {a, b, c}) p.mutable_grad() = torch::ones(2);
  optimizer.step();
  EXPECT_TRUE(torch::equal(a, torch::full(2, 0.5)));
  EXPECT_TRUE(torch::equal(b, torch::full(2, 0.75)));
  EXPECT_TRUE(torch::equal(c, torch::zeros(2)));
  optimizer.zero_grad(false);
  EXPECT_TRUE(torch::equal(a.grad(), torch::zeros(2)));
  optimizer.zero_grad();
  EXPECT_FALSE(a.grad().defined());
}

// Fused kernels on the CPU read memory in order and ignore strides.
TEST(Optimizer, GradientsMayHaveOtherStridesThanParameters) {
  for (const auto& one : cases()) {
    const auto p = value(0).requires_grad_(), q = value(0).requires_grad_();
    p.mutable_grad() = value(0, 1).t().contiguous().t();
    q.mutable_grad() = value(0, 1);
    one.make({p})->step();
    one.make({q})->step();
    EXPECT_TRUE(torch::equal(p, q)) << one.name;
  }
}

TEST(Optimizer, ErrorsNameWhatIsWrong) {
  const auto p = torch::ones({2, 3}, torch::requires_grad()), q = torch::ones(4, torch::requires_grad());
  EXPECT_ERROR(UsageError, SGD(Tensors{}), "SGD: group 0 has no parameters");
  EXPECT_ERROR(UsageError, SGD(Tensors{p, q, p}), "parameter 2 of group 0", "[2, 3]", "twice");
  EXPECT_ERROR(UsageError, SGD(Tensors{q, p * 2}), "parameter 1 of group 0", "not a leaf");
  EXPECT_ERROR(UsageError, SGD(Tensors{torch::ones(2, torch::kLong)}), "floating");
  EXPECT_ERROR(UsageError, SGD(Tensors{p, torch::Tensor()}), "parameter 1 of group 0 is undefined");
  EXPECT_ERROR(UsageError, SGD({p}, {.lr = -1}), "SGD: lr must be at least 0; found -1");
  EXPECT_ERROR(UsageError, SGD({p}, {.nesterov = true}), "nesterov needs momentum");
  EXPECT_ERROR(UsageError, SGD({p}, {.foreach = true, .fused = true}), "foreach and fused");
  EXPECT_ERROR(UsageError, SGD({p}, {.lr = torch::ones(2)}), "one element");
  EXPECT_ERROR(UsageError, AdamW({p}, {.betas = {0.9, 1}}), "AdamW: betas", "found 0.9 and 1");
  EXPECT_ERROR(UsageError, Adam({p}, {.eps = -1}), "Adam: eps");

  SGD optimizer({p}, {.lr = 1});
  EXPECT_ERROR(UsageError, optimizer.add_param_group({{q, p}}), "parameter 1 of group 1",
               "already parameter 0 of group 0");
  EXPECT_EQ(optimizer.group_count(), 1u);
  optimizer.add_param_group({{q}, {.lr = 1}});
  p.mutable_grad() = torch::ones({2, 3});
  q.mutable_grad() = torch::ones(4).to_sparse();
  EXPECT_ERROR(UsageError, optimizer.step(), "SGD: parameter 0 of group 1", "to_dense");
  EXPECT_TRUE(torch::equal(p, torch::ones({2, 3})));  // nothing was changed

  const auto gaps = torch::ones({4, 4}).narrow(1, 0, 2).detach().requires_grad_();
  gaps.mutable_grad() = torch::ones({4, 2});
  AdamW fused({gaps}, {.fused = true}), not_fused({gaps});
  EXPECT_ERROR(UsageError, fused.step(), "is not dense in memory", "fused = false");
  not_fused.step();
  EXPECT_LT(gaps.max().item<float>(), 1);
}

TEST(Optimizer, ErrorsOfDistributedParameters) {
  run_ranks(2, [](Rank& me) {
    const auto mesh = me.mesh("tp=2");
    at::Tensor p = distribute_tensor(value(0), mesh, {Shard(0)}).detach().requires_grad_();
    Adam optimizer({p});
    p.mutable_grad() = distribute_tensor(value(0), mesh, {Shard(0)});
    optimizer.step();
    optimizer.zero_grad();
    p.set_data(distribute_tensor(value(0), mesh, {Replicate()}));
    p.mutable_grad() = distribute_tensor(value(0), mesh, {Replicate()});
    EXPECT_ERROR(UsageError, optimizer.step(), "redistributed after its first step", "exp_avg");

    const auto partial = DTensor::from_local(value(0), mesh, {Partial()}).detach().requires_grad_();
    partial.mutable_grad() = torch::ones_like(partial);
    SGD other({partial});
    EXPECT_ERROR(ShardingError, other.step(), "P(sum)", "redistribute it first");
  });
}

}  // namespace
}  // namespace tessera::optim
