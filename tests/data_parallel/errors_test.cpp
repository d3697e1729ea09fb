// Errors of data parallelism: each names the rank and the parameter, before a wrong value can be used.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/nn/distribute_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;
using testing::error_message;

MLP mlp(int64_t width = 16) {
  return MLP(models::MLPConfig{.layers = {{"net1", 10, width}, {"net2", width, 10}}, .seed = 5});
}

TEST(DataParallelErrors, ParametersDifferAcrossRanks) {
  run_ranks(3, [](Rank& me) {
    auto model = mlp(me.rank == 2 ? 8 : 16);
    const auto said = error_message<UsageError>([&] { DistributedDataParallel ddp(model); });
    EXPECT_CONTAINS(said, "Rank 2 has 'net1.weight Float[8, 10]' where the first rank has 'net1.weight Float[16, 10]'");
    EXPECT_EQ(model->layers[0]->weight.size(0), me.rank == 2 ? 8 : 16);  // nothing was broadcast
  });
}

TEST(DataParallelErrors, MoreParametersOnOneRank) {
  run_ranks(2, [](Rank& me) {
    models::MLPConfig config{.layers = {{"net1", 10, 10}}, .seed = 5};
    if (me.rank == 1) config.layers.push_back({"net2", 10, 10});
    MLP model(config);
    EXPECT_ERROR(UsageError, DistributedDataParallel(model), "Rank 1 has 'net2.weight", "DistributedDataParallel");
  });
}

TEST(DataParallelErrors, OptionsDifferAcrossRanks) {
  run_ranks(2, [](Rank& me) {
    auto model = mlp();
    const DDPOptions options{.find_unused_parameters = me.rank == 1};
    EXPECT_ERROR(UsageError, DistributedDataParallel(model, options), "Rank 1 has", "find_unused_parameters 1",
                 "find_unused_parameters 0");
  });
}

TEST(DataParallelErrors, NoParameters) {
  run_ranks(2, [](Rank&) {
    MLP model(models::MLPConfig{});
    EXPECT_ERROR(UsageError, DistributedDataParallel(model), "the module has no parameters");
  });
}

TEST(DataParallelErrors, WrongOptions) {
  run_ranks(4, [](Rank& me) {
    auto model = mlp();
    const auto mesh = me.mesh("dp=2,tp=2");
    EXPECT_ERROR(UsageError, DistributedDataParallel(model, {.device_mesh = mesh}), "has 2 axes", "mesh[\"dp\"]");
    EXPECT_ERROR(UsageError, DistributedDataParallel(model, {.device_mesh = mesh["dp"], .process_group = me.group()}),
                 "both device_mesh and process_group");
    EXPECT_ERROR(UsageError, DistributedDataParallel(model, {.bucket_cap_mb = 0.0}), "bucket_cap_mb is 0");
    EXPECT_ERROR(UsageError, replicate(model, {{.device_mesh = mesh}}), "has 2 axes");
    auto deferred = deferred_init([] { return nn::Linear(2, 2); });
    EXPECT_ERROR(UsageError, DistributedDataParallel(deferred), "weight has no values yet", "materialize");
  });
}

TEST(DataParallelErrors, ParametersDistributedOverTheSameAxis) {
  run_ranks(2, [](Rank& me) {
    auto model = mlp();
    const auto mesh = me.mesh("dp=2");
    distribute_module(*model, mesh);
    EXPECT_EQ(pre_dp_module_transform(*model).size(), 4u);
    EXPECT_ERROR(UsageError, DistributedDataParallel(model, {.device_mesh = mesh}), "net1.weight", "rank ",
                 "over which gradients are averaged");
  });
}

TEST(DataParallelErrors, SecondCommHook) {
  run_ranks(2, [](Rank&) {
    auto model = mlp(), other = mlp();
    DistributedDataParallel ddp(model);
    ddp->register_comm_hook(nullptr, allreduce_hook);
    EXPECT_ERROR(UsageError, ddp->register_comm_hook(nullptr, allreduce_hook), "a comm hook is registered already");
    auto handle = replicated(replicate(other));
    handle.register_comm_hook(nullptr, allreduce_hook);
    EXPECT_ERROR(UsageError, handle.register_comm_hook(nullptr, allreduce_hook), "a comm hook is registered already");
  });
}

struct MaybeImpl : torch::nn::Cloneable<MaybeImpl> {
  nn::Linear always{nullptr}, maybe{nullptr};
  MaybeImpl() { reset(); }
  void reset() override {
    always = register_module("always", nn::Linear(10, 10));
    maybe = register_module("maybe", nn::Linear(10, 10));
  }
  torch::Tensor forward(torch::Tensor x, int times) {
    x = always(x);
    for (int i = 0; i < times; i++) x = maybe(x);
    return x;
  }
};
TESSERA_MODULE(Maybe);

TEST(DataParallelErrors, UnusedParameters) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    Maybe model;
    DistributedDataParallel ddp(model);
    const auto& batch = data[static_cast<size_t>(me.rank)];
    EXPECT_ERROR(UsageError, ddp(batch, 0).sum().backward(), "parameters maybe.weight, maybe.bias got no gradient",
                 me.rank == 0 ? "backward pass 1 of rank 0" : "backward pass 1 of rank 1", "find_unused_parameters");
    ddp->zero_grad();
    ddp(batch, 1).sum().backward();  // training can continue
    EXPECT_EQ(testing::close(model->maybe->bias.grad(), torch::full({10}, 4.0)), "");
    EXPECT_ERROR(UsageError, ddp(batch, 0).sum().backward(), "maybe.weight");
    EXPECT_ERROR(UsageError, ddp(batch, 0).sum().backward(), "maybe.weight");
  });
}

// After a failed pass all its collectives are waited for: the next pass is correct, and nothing stays in flight.
TEST(DataParallelErrors, AFailedPassLeavesNothingBehind) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    models::MLP model(models::MLPConfig{.layers = {{"a", 10, 10}, {"b", 10, 10}, {"c", 10, 10}}, .seed = 5});
    DistributedDataParallel ddp(model, {.bucket_cap_mb = 1.0 / (1 << 20)});  // one bucket per parameter
    const auto& batch = data[static_cast<size_t>(me.rank)];
    for (int i = 0; i < 2; i++) ddp(batch).sum().backward();
    ddp->zero_grad();
    ddp(batch);
    auto hidden = model->layers[0](batch).detach();
    EXPECT_ERROR(UsageError, model->layers[2](model->layers[1](hidden)).sum().backward(), "a.weight, a.bias");
    ddp->zero_grad();
    ddp(batch).sum().backward();
    EXPECT_EQ(me.group()->pending(), 0u);
    EXPECT_EQ(testing::close(model->layers[2]->bias.grad(), torch::full({10}, 4.0)), "");
  });
}

TEST(DataParallelErrors, GraphChangesUnderStaticGraph) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    const auto& batch = data[static_cast<size_t>(me.rank)];
    Maybe one, none;
    DistributedDataParallel used(one, {.static_graph = true}), unused(none, {.static_graph = true});
    used(batch, 1).sum().backward();
    EXPECT_ERROR(UsageError, used(batch, 0).sum().backward(), "maybe.weight, maybe.bias got no gradient",
                 "static_graph promises that the graph does not change");
    unused(batch, 0).sum().backward();
    EXPECT_ERROR(UsageError, unused(batch, 1).sum().backward(), "parameter maybe.", "got its gradient 1 times",
                 "expected: 0");
  });
}

TEST(DataParallelErrors, StaticGraphsDifferAcrossRanks) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    Maybe model;
    DistributedDataParallel ddp(model, {.static_graph = true});
    EXPECT_ERROR(UsageError, ddp(data[0], me.rank == 0).sum().backward(), "static_graph", "Rank 1 has",
                 "maybe.weight with 0 gradients");
  });
}

struct TwiceImpl : torch::nn::Cloneable<TwiceImpl> {
  nn::Linear layer{nullptr};
  TwiceImpl() { reset(); }
  void reset() override { layer = register_module("layer", nn::Linear(10, 10)); }
  torch::Tensor forward(torch::Tensor x) { return layer(x); }
};
TESSERA_MODULE(Twice);

// A hook on the output runs a nested backward.
at::Tensor with_inner_backward(at::Tensor y, Twice& model, const at::Tensor& batch) {
  y.register_hook([&](const at::Tensor&) {
    const at::AutoGradMode on(true);
    model(batch).sum().backward();
  });
  return y.sum();
}

TEST(DataParallelErrors, GradientThatIsAccumulatedTwice) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    Twice model, fixed, plain;
    const auto& batch = data[static_cast<size_t>(me.rank)];
    DistributedDataParallel ddp(model);  // both backwards are complete: each reduces the accumulated gradients
    with_inner_backward(ddp(batch), model, batch).backward();
    for (const auto& x : data) plain(x).sum().backward();
    EXPECT_EQ(testing::close(model->layer->weight.grad(), plain->layer->weight.grad()), "");

    DistributedDataParallel once(fixed, {.static_graph = true});
    once(batch).sum().backward();
    EXPECT_ERROR(UsageError, with_inner_backward(once(batch), fixed, batch).backward(), "parameter layer.",
                 "got its gradient 2 times in backward pass 2 (expected: 1)", "static_graph");
  });
}

TEST(DataParallelErrors, SynchronizationOnOneRankOnly) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = mlp();
    DistributedDataParallel ddp(model);
    ddp(data[0]).sum().backward();
    ddp->zero_grad();
    if (me.rank == 1) {
      const auto guard = ddp->no_sync();
      ddp(data[1]).sum().backward();
    }
    EXPECT_ERROR(CommError, ddp(data[0]).sum().backward(), "ranks disagree", "pass 2 bucket 0", "pass 3 bucket 0",
                 "rank 0", "rank 1", "gradients of net2.bias, net2.weight, net1.bias, net1.weight");
  });
}

TEST(DataParallelErrors, UnevenAccumulationCanBeAllowed) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = mlp(), plain = mlp();
    DistributedDataParallel ddp(model, {.uneven_accumulation = true});
    if (me.rank == 1) {
      const auto guard = ddp->no_sync();
      ddp(data[1]).sum().backward();
    }
    ddp(data[0]).sum().backward();
    for (int i = 0; i < 2; i++) (plain(data[0]).sum() * 0.5).backward();
    (plain(data[1]).sum() * 0.5).backward();
    EXPECT_EQ(testing::close(gradients_of(*ddp), gradients_of(*plain)), "");
  });
}

TEST(DataParallelErrors, SecondDerivatives) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = mlp();
    DistributedDataParallel ddp(model);
    auto loss = ddp(data[static_cast<size_t>(me.rank)]).pow(2).sum();
    EXPECT_ERROR(UsageError, loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true), "net2.bias",
                 "create_graph");
  });
}

TEST(DataParallelErrors, CommHookThatReturnsTooFewValues) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank&) {
    auto model = mlp();
    DistributedDataParallel ddp(model);
    ddp->register_comm_hook(3, [](int, GradBucket& bucket) { return bucket.buffer().narrow(0, 0, 3); });
    EXPECT_ERROR(UsageError, ddp(data[0]).sum().backward(), "the comm hook returned 3 values for bucket 0");
  });
}

TEST(DataParallelErrors, NotReplicated) {
  auto model = mlp();
  EXPECT_ERROR(UsageError, replicated(*model), "MLP was not given to replicate()");
  torch::nn::Linear plain(2, 2);
  EXPECT_ERROR(UsageError, replicate(*plain), "Linear cannot have hooks");
}

}  // namespace
}  // namespace tessera
