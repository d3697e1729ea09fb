#include "tessera/nn/distribute_module.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera {
namespace {

using testing::run_ranks;

struct MLPImpl : torch::nn::Cloneable<MLPImpl> {
  MLPImpl() { reset(); }
  void reset() override {
    up = register_module("up", nn::Linear(4, 6));
    norm = register_module("norm", nn::BatchNorm1d(3));
    down = register_module("down", nn::Linear(6, 4));
  }
  torch::Tensor forward(torch::Tensor x) { return down(torch::relu(up(x))); }
  nn::Linear up{nullptr}, down{nullptr};
  nn::BatchNorm1d norm{nullptr};
};
TESSERA_MODULE(MLP);

// Tensor parallelism by hand: up is sharded along dim 0, down along dim 1.
void shard(const std::string& name, Module& module, const DeviceMesh& mesh) {
  if (name != "up" && name != "down") return;
  auto& linear = *module.as<torch::nn::LinearImpl>();
  distribute_in_place(linear.weight, mesh, {Shard(name == "up" ? 0 : 1)});
  if (name == "up") distribute_in_place(linear.bias, mesh, {Shard(0)});
}

Replacement replicated(Module&, const Tensors& inputs, const DeviceMesh& mesh) {
  return Tensors{DTensor::from_local(inputs[0], mesh, {Replicate()})};
}
Replacement full(Module&, const Tensors& outputs, const DeviceMesh&) {
  return Tensors{DTensor(outputs[0]).full_tensor()};
}

TEST(DistributeModule, PartitionsParametersReplicatesTheRestAndHooksTheRoot) {
  const MLP original;
  const auto data = torch::randn({5, 4});
  run_ranks(2, [&](testing::Rank&) {
    auto model = clone(original), plain = clone(original);
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"});
    distribute_module(*model, mesh, {shard, replicated, full});
    EXPECT_EQ(DTensor(model->up->weight).placements()[0], Shard(0));
    EXPECT_EQ(DTensor(model->down->weight).placements()[0], Shard(1));
    EXPECT_EQ(DTensor(model->down->bias).placements()[0], Replicate());
    EXPECT_TRUE(is_dtensor(model->norm->running_mean));

    auto x = data.clone().requires_grad_(), x2 = data.clone().requires_grad_();
    CommDebugMode comm;
    const auto y = model(x);
    EXPECT_EQ(comm.get_total_counts(), 1);  // the all-reduce of the output of down
    EXPECT_FALSE(is_dtensor(y));
    const auto expected = plain(x2);
    EXPECT_EQ(testing::close(y, expected), "");
    y.pow(2).sum().backward();
    expected.pow(2).sum().backward();
    EXPECT_EQ(testing::close(x.grad(), x2.grad()), "");
    EXPECT_EQ(testing::close(DTensor(model->up->weight.grad()).full_tensor(), plain->up->weight.grad()), "");
  });
}

TEST(DistributeModule, AnErrorLeavesTheModuleUnchanged) {
  run_ranks(2, [](testing::Rank&) {
    MLP model;
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"});
    const auto fail = [](const std::string& name, Module& module, const DeviceMesh& m) {
      shard(name, module, m);
      TORCH_CHECK(name != "down", "no more");
    };
    EXPECT_ERROR(c10::Error, distribute_module(*model, mesh, {fail}), "no more");
    for (const auto& p : model->parameters()) EXPECT_FALSE(is_dtensor(p));
    EXPECT_EQ(model->up->weight.size(0), 6);
    torch::nn::Linear plain(2, 2);
    EXPECT_ERROR(UsageError, distribute_module(*plain, mesh, {{}, replicated}), "tessera::nn::Linear");
    EXPECT_FALSE(is_dtensor(plain->weight));
  });
}

// Without Tessera holders: distributed parameters with plain inputs.
struct TypedImpl : torch::nn::Module {
  TypedImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    up = register_module("up", torch::nn::Linear(4, 6));
  }
  torch::Tensor forward(torch::Tensor x) { return up(torch::tanh(first(x))); }
  torch::nn::Linear first{nullptr}, up{nullptr};
};
TORCH_MODULE(Typed);

TEST(DistributeModule, AParameterWithTakesPlainReturnsPlainGradients) {
  Typed reference;
  const auto x = torch::randn({5, 4});
  const auto expected = torch::autograd::grad({reference(x).pow(2).sum()}, reference->parameters());
  run_ranks(2, [&](testing::Rank&) {
    Typed model;
    {
      torch::NoGradGuard no_grad;
      for (auto& item : model->named_parameters()) item->copy_(reference->named_parameters()[item.key()]);
    }
    const DeviceMesh mesh = init_device_mesh("cpu", {2}, {"tp"});
    distribute_in_place(model->up->weight, mesh, {Shard(0)});
    distribute_in_place(model->up->bias, mesh, {Shard(0)});
    EXPECT_ERROR(UsageError, model(x), "plain tensor");
    detail::meta_of(model->up->weight).accepts_plain = true;
    for (int step = 0; step < 2; step++) {
      model->zero_grad();
      const auto y = model(x);
      EXPECT_EQ(DTensor(y).placements()[0], Shard(1));
      y.pow(2).sum().backward();
      EXPECT_FALSE(is_dtensor(model->first->weight.grad()));
      EXPECT_EQ(testing::close(model->first->weight.grad(), expected[0]), "");
      EXPECT_EQ(testing::close(DTensor(model->up->weight.grad()).full_tensor(), expected[2]), "");
    }
  });
}

}  // namespace
}  // namespace tessera
