// What data parallelism must not do silently, case by case. The random sequences are in sequences_soak_test.cpp.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/data_parallel/fsdp/state_dict.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/expect_error.h"
#include "tests/fixtures/fsdp.h"

#include <gtest/gtest.h>

#include <chrono>
#include <functional>

namespace tessera {
namespace {

using namespace fixtures;
using testing::error_message;

const at::Tensor& batch_of(const Tensors& data, const Rank& me) { return data[static_cast<size_t>(me.rank)]; }

void set_all_requires_grad(const torch::nn::Module& module, bool on) {
  for (auto& p : module.parameters()) p.requires_grad_(on);
}

// ---- all parameters frozen; modules without forward

// The generator trains while the discriminator is frozen; then the discriminator trains.
TEST(DataParallelTrust, AllParametersFrozen) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    for (const bool in_place : {false, true}) {
      auto model = clone(start), plain = clone(start);
      set_all_requires_grad(*model, false);
      std::function<at::Tensor(const at::Tensor&)> forward = [&](const at::Tensor& x) { return model(x); };
      if (in_place)
        replicate(model);
      else
        forward = [ddp = DistributedDataParallel(model)](const at::Tensor& x) mutable { return ddp(x); };
      auto x = batch_of(data, me).clone().requires_grad_();
      forward(x).pow(2).mean().backward();
      EXPECT_TRUE(x.grad().defined());
      set_all_requires_grad(*model, true);
      forward(batch_of(data, me)).pow(2).mean().backward();
      accumulate_means(plain, data, square_loss);
      EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain), kExact), "");
      set_all_requires_grad(*model, false);
      forward(x).pow(2).mean().backward();
      EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain), kExact), "");
    }
  });
}

TEST(DataParallelTrust, ModuleListIsRefused) {
  run_ranks(2, [](Rank&) {
    MLPStacked model;
    EXPECT_ERROR(UsageError, replicate(*model->layers), "ModuleList", "has no forward", "the module around it");
  });
}

// ---- lifetimes

// Whatever is gone before backward: gradients are reduced, or the module says why not. Nothing refers to freed memory.
TEST(DataParallelTrust, WrapperIsGoneBeforeBackward) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    for (const DDPOptions& options : {DDPOptions{}, {.find_unused_parameters = true}, {.static_graph = true}}) {
      auto model = clone(start), plain = clone(start), second = clone(start);
      at::Tensor loss, loss_of_second;
      Tensors parameters = second->parameters();
      {
        DistributedDataParallel ddp(model, options);
        loss = ddp(batch_of(data, me)).pow(2).mean();
        replicate(second, {options});
        loss_of_second = second(batch_of(data, me)).pow(2).mean();
        second = nullptr;
      }
      loss.backward();
      loss_of_second.backward();
      accumulate_means(plain, data, square_loss);
      EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain), kExact), "");
      for (size_t i = 0; i < parameters.size(); i++)
        EXPECT_EQ(close(parameters[i].grad(), plain->parameters()[i].grad(), kExact), "");
      model(batch_of(data, me)).sum().backward();  // a plain module again
    }
  });
}

TEST(DataParallelTrust, ParameterIsFrozenBeforeBackward) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    for (const DDPOptions& options : {DDPOptions{}, {.find_unused_parameters = true}, {.static_graph = true}}) {
      auto model = clone(start), plain = clone(start);
      DistributedDataParallel ddp(model, options);
      for (int step = 0; step < 2; step++) {
        auto loss = ddp(batch_of(data, me)).pow(2).mean();
        model->layers[0]->weight.requires_grad_(false);
        ddp(batch_of(data, me));  // makes new buckets, and the first graph still exists
        loss.backward();
        model->layers[0]->weight.requires_grad_(true);
      }
      plain->layers[0]->weight.requires_grad_(false);
      for (int step = 0; step < 2; step++) accumulate_means(plain, data, square_loss);
      EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain), kExact), "");
    }
  });
}

TEST(DataParallelTrust, NoSyncGuardOutlivesTheWrapper) {
  run_ranks(2, [](Rank&) {
    auto ddp = std::make_optional<DistributedDataParallel<MLP>>(mlp());
    const auto guard = (*ddp)->no_sync();
    ddp.reset();
  });
}

TEST(DataParallelTrust, ShardedModuleIsGoneBeforeBackward) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start), plain = clone(start);
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    const auto weight = model->layers[0]->weight;
    auto loss = square_loss(model, batch_of(data, me));
    model = nullptr;
    loss.backward();
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(full_value(weight.grad()), plain->layers[0]->weight.grad()), "");
  });
}

// ---- a rank that is alone in changing the module

// Every rank has an error that names the parameter or what the others did, long before the time-out.
void expect_named_at_once(const std::function<std::function<at::Tensor(const at::Tensor&)>(MLP&, Rank&)>& wrap) {
  for (const bool before_backward : {false, true})
    for (const bool all : {false, true}) {
      if (before_backward && all) continue;
      const auto begin = std::chrono::steady_clock::now();
      run_ranks(3, [&](Rank& me) {
        auto model = mlp();
        const auto forward = wrap(model, me);
        const auto x = batches(3)[static_cast<size_t>(me.rank)];
        forward(x).pow(2).mean().backward();
        auto freeze = [&] {
          if (me.rank != 1) return;
          model->layers[0]->weight.requires_grad_(false);
          if (all) set_all_requires_grad(*model, false);
        };
        const auto said = error_message<CommError>([&] {
          if (!before_backward) freeze();
          auto loss = forward(x.clone().requires_grad_()).pow(2).mean();
          if (before_backward) freeze();
          loss.backward();
          forward(x);
        });
        EXPECT_CONTAINS(said, "rank 1 posted");
        EXPECT_CONTAINS(said, before_backward ? "1 frozen" : "net1.weight was frozen");
      });
      const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
      EXPECT_LT(seconds.count(), 20.0) << "the time-out is 60 s";
    }
}

TEST(DataParallelTrust, OneRankFreezesUnderDDP) {
  expect_named_at_once([](MLP& model, Rank&) {
    return [ddp = DistributedDataParallel(model)](const at::Tensor& x) mutable { return ddp(x); };
  });
}
TEST(DataParallelTrust, OneRankFreezesUnderReplicate) {
  expect_named_at_once([](MLP& model, Rank&) {
    replicate(model, {{.find_unused_parameters = true}});
    return [model](const at::Tensor& x) mutable { return model(x); };
  });
}
TEST(DataParallelTrust, OneRankFreezesUnderFullyShard) {
  expect_named_at_once([](MLP& model, Rank& me) {
    for (auto& layer : model->layers) fully_shard(layer, {.mesh = me.mesh("dp=3")});
    fully_shard(model, {.mesh = me.mesh("dp=3")});
    return [model](const at::Tensor& x) mutable { return model(x); };
  });
}
TEST(DataParallelTrust, OneRankFreezesUnderFSDP1) {
  expect_named_at_once([](MLP& model, Rank& me) {
    return [fsdp = FullyShardedDataParallel(model, {.device_mesh = me.mesh("dp=3"), .use_orig_params = true})](
               const at::Tensor& x) mutable { return fsdp(x); };
  });
}

// ---- sharded modules

// A flat parameter that is frozen when it is made and unfrozen later, and the reverse.
TEST(DataParallelTrust, FlatParameterIsUnfrozen) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start), plain = clone(start);
    set_all_requires_grad(*model, false);
    FullyShardedDataParallel fsdp(model, {.device_mesh = me.mesh("dp=2")});
    auto flat = fsdp->flat_params()[0];
    EXPECT_FALSE(fsdp(batch_of(data, me)).requires_grad());
    flat.requires_grad_(true);
    square_loss(model, batch_of(data, me)).backward();
    ASSERT_TRUE(flat.grad().defined());
    const auto gradient = flat.grad().clone();
    flat.requires_grad_(false);
    EXPECT_FALSE(fsdp(batch_of(data, me)).requires_grad());
    EXPECT_EQ(close(flat.grad(), gradient, kExact), "");
    accumulate_means(plain, data, square_loss);
    Tensors flattened;
    for (const auto& g : gradients_of(*plain)) flattened.push_back(g.flatten());
    EXPECT_EQ(close(gradient, torch::cat(flattened).chunk(2)[static_cast<size_t>(me.rank)]), "");
  });
}

// Gradients of a flat parameter that are not reduced: a later pass takes them along, and zero_grad() discards them.
TEST(DataParallelTrust, FlatParameterWithoutSync) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    for (const int zero : {0, 1, 2}) {
      auto model = clone(start), plain = clone(start);
      FullyShardedDataParallel fsdp(model, {.device_mesh = me.mesh("dp=2")});
      optim::SGD optimizer(fsdp->parameters());
      for (int pass = 0; pass < 2; pass++) {
        const auto guard = fsdp->no_sync();
        square_loss(model, batch_of(data, me)).backward();
        EXPECT_ERROR(UsageError, fsdp->clip_grad_norm_(1), "not reduced yet");
      }
      if (zero > 0) optimizer.zero_grad(zero == 1);
      square_loss(model, batch_of(data, me)).backward();
      for (int pass = zero > 0 ? 2 : 0; pass < 3; pass++) accumulate_means(plain, data, square_loss);
      Tensors flattened;
      for (const auto& g : gradients_of(*plain)) flattened.push_back(g.flatten());
      EXPECT_EQ(close(fsdp->flat_params()[0].grad(), torch::cat(flattened).chunk(2)[static_cast<size_t>(me.rank)]), "");
    }
  });
}

// The optimizer writes to the shard of rank 1 only, because rank 0 has nothing but frozen elements of the flat
// parameter. All ranks must find that the unsharded buffer, which the evaluation keeps, is stale.
TEST(DataParallelTrust, ARankWithFrozenElementsOnly) {
  const auto start = mlp();
  const auto x = batches(1)[0];
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start), plain = clone(start);
    for (const auto& each : {model, plain}) {
      set_all_requires_grad(*each, false);
      each->parameters().back().requires_grad_(true);
    }
    FullyShardedDataParallel fsdp(
        model,
        {.device_mesh = me.mesh("dp=2"), .sharding_strategy = ShardingStrategy::ShardGradOp, .use_orig_params = true});
    optim::SGD optimizer(fsdp->parameters(), {.lr = 0.5}), plain_optimizer(plain->parameters(), {.lr = 0.5});
    for (int pass = 0; pass < 2; pass++) {
      square_loss(model, x).backward();
      square_loss(plain, x).backward();
      const at::NoGradGuard no_grad;
      EXPECT_EQ(close(fsdp(x), plain(x)), "");
      optimizer.step();
      plain_optimizer.step();
      EXPECT_EQ(close(fsdp(x), plain(x)), "");
    }
  });
}

// A parameter that requires a gradient in passes under no_sync() alone is reduced by the next pass, although frozen.
TEST(DataParallelTrust, UnfrozenUnderNoSyncOnly) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start), plain = clone(start);
    auto last = model->parameters().back(), plain_last = plain->parameters().back();
    last.requires_grad_(false);
    DistributedDataParallel ddp(model);
    last.requires_grad_(true);
    {
      const auto guard = ddp->no_sync();
      ddp(batch_of(data, me)).pow(2).mean().backward();
    }
    last.requires_grad_(false);
    ddp(batch_of(data, me)).pow(2).mean().backward();
    accumulate_means(plain, data, square_loss);
    plain_last.requires_grad_(false);
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain)), "");
  });
}

// A module from torch::nn, which cannot have hooks.
TEST(DataParallelTrust, ModulesWithoutHooks) {
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    torch::nn::Sequential model(torch::nn::Linear(10, 6), torch::nn::Linear(6, 10)), plain;
    for (auto& p : model->parameters()) p.data().fill_(0.125);
    plain = torch::nn::Sequential(std::dynamic_pointer_cast<torch::nn::SequentialImpl>(model->clone()));
    auto &first = *model->ptr(0), &second = *model->ptr(1);
    second.parameters()[1].requires_grad_(false);
    fully_shard(first, {.mesh = me.mesh("dp=2")});
    fully_shard(second, {.mesh = me.mesh("dp=2")});
    second.parameters()[1].requires_grad_(true);
    const auto reference = [&](const at::Tensor& x) { return plain->forward(x).pow(2).mean(); };
    const auto pass = [&](bool sync) {
      fsdp_module(first).set_requires_gradient_sync(sync);
      fsdp_module(second).set_requires_gradient_sync(sync);
      model->forward(batch_of(data, me)).pow(2).mean().backward();
      for (const auto& x : data) (reference(x) / 2).backward();
    };
    const auto check = [&] {
      for (size_t i = 0; i < 4; i++)
        EXPECT_EQ(close(full_value(model->parameters()[i].grad()), plain->parameters()[i].grad()), "") << i;
    };
    pass(true);
    check();
    pass(false);
    for (const auto& p : model->parameters()) p.mutable_grad().reset();
    for (const auto& p : plain->parameters()) p.mutable_grad().reset();
    pass(true);
    check();
    pass(false);
    pass(true);
    check();
  });
}

// In summon_full_params a parameter may get other memory: from the user, or a copy on the CPU (offload_to_cpu).
TEST(DataParallelTrust, SummonWritesBackNewMemory) {
  run_ranks(2, [](Rank& me) {
    for (const auto strategy : {ShardingStrategy::NoShard, ShardingStrategy::FullShard})
      for (const bool use_orig_params : {false, true}) {
        auto model = mlp();
        FullyShardedDataParallel fsdp(
            model, {.device_mesh = me.mesh("dp=2"), .sharding_strategy = strategy, .use_orig_params = use_orig_params});
        {
          const SummonFullParams full(*model);
          model->layers[0]->bias.set_data(torch::full({16}, 7.0));
        }
        const auto dict = get_model_state_dict(*model, {.full_state_dict = true});
        EXPECT_EQ(close(dict.at("net1.bias"), torch::full({16}, 7.0)), "") << strategy;
      }
  });
}

TEST(DataParallelTrust, StateDictNamesWithoutWrappers) {
  run_ranks(2, [](Rank& me) {
    auto model = mlp(), other = mlp(), third = mlp();
    const auto names = state_dict(*model).names();
    FullyShardedDataParallel fsdp(model, {.device_mesh = me.mesh("dp=2")});
    EXPECT_EQ(get_model_state_dict(*fsdp).names(), names);
    DistributedDataParallel ddp(other);
    EXPECT_EQ(get_model_state_dict(*ddp).names(), names);
    EXPECT_EQ(state_dict(*ddp).names()[0], "module.net1.weight");  // as in PyTorch
    set_model_state_dict(*ddp, get_model_state_dict(*fsdp, {.full_state_dict = true}));
    optim::SGD optimizer(ddp->parameters(), {.lr = 0.1, .momentum = 0.9});
    ddp(torch::ones({2, 10})).sum().backward();
    optimizer.step();
    EXPECT_TRUE(get_optimizer_state_dict(optimizer, *ddp).contains("state.net1.weight.momentum_buffer"));
  });
}

// A state dict between forward and backward: sharded values, no communication, and backward is unchanged.
TEST(DataParallelTrust, StateDictBeforeBackward) {
  const auto start = mlp();
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start), plain = clone(start);
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    auto loss = square_loss(model, batch_of(data, me));
    if (me.rank == 0) {
      for (const auto& [name, value] : state_dict(*model)) EXPECT_TRUE(is_dtensor(value)) << name;
    }
    loss.backward();
    accumulate_means(plain, data, square_loss);
    expect_gradients(*model, *plain);
    loss = square_loss(model, batch_of(data, me));
    load_state_dict(*model, state_dict(*start));  // also between forward and backward
    expect_sharded(*model);
    EXPECT_ERROR(UsageError, loss.backward(), "was modified between the forward and the backward");
  });
}

}  // namespace
}  // namespace tessera
