#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"

#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/random.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/sgd.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace tessera {
namespace {

using namespace fixtures;

at::Tensor flattened(const Tensors& tensors) {
  Tensors rows;
  for (const auto& t : tensors) rows.push_back(t.flatten());
  return torch::cat(rows);
}

// Every strategy. Parameters differ until rank 0's are broadcast. One pass is under no_sync().
TEST(FullyShardedDataParallel, TrainsLikeThePlainModule) {
  const MLP start(models::mlp_module());
  const auto data = batches(4);
  for (const auto strategy : {ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard,
                              ShardingStrategy::HybridShard, ShardingStrategy::HybridShardZero2})
    for (const bool use_orig_params : {false, true}) {
      SCOPED_TRACE(c10::str(strategy, use_orig_params));
      run_ranks(4, [&](Rank& me) {
        auto plain = clone(start), model = clone(start);
        if (me.rank > 0) model->layers[0]->weight.data().fill_(static_cast<double>(me.rank));
        const bool hybrid = strategy == ShardingStrategy::HybridShard || strategy == ShardingStrategy::HybridShardZero2;
        FullyShardedDataParallel fsdp(model, {.device_mesh = me.mesh(hybrid ? "replicate=2,shard=2" : "dp=4"),
                                              .sharding_strategy = strategy,
                                              .use_orig_params = use_orig_params,
                                              .sync_module_states = true});
        optim::SGD plain_opt(plain->parameters(), {.lr = 0.5}), opt(fsdp->parameters(), {.lr = 0.5});
        for (int step = 0; step < 3; step++) {
          plain_opt.zero_grad();
          opt.zero_grad();
          const auto& batch = data[static_cast<size_t>(me.rank)];
          if (step == 1) {
            const auto guard = fsdp->no_sync();
            fsdp(batch).pow(2).mean().backward();
          }
          fsdp(batch).pow(2).mean().backward();
          for (int i = 0; i < (step == 1 ? 2 : 1); i++)
            for (const auto& x : data) (square_loss(plain, x) / 4).backward();
          plain_opt.step();
          opt.step();
        }
        const SummonFullParams full(*model);
        EXPECT_EQ(close(values_of(*model), values_of(*plain)), "");
      });
    }
}

TEST(FullyShardedDataParallel, FlatGradientsAreTheParametersGradients) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    FullyShardedDataParallel fsdp(model, {.use_orig_params = true});
    square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    const auto flat = fsdp->flat_params()[0];
    flat.grad().fill_(7);
    flat.data().fill_(8);
    for (const auto& p : model->parameters()) {
      EXPECT_EQ(p.dim(), 1);
      EXPECT_TRUE((p == 8).all().item<bool>());
      EXPECT_EQ(p.grad().defined(), p.numel() > 0);
      EXPECT_TRUE(!p.grad().defined() || (p.grad() == 7).all().item<bool>());
    }
    for (const auto& p : model->parameters()) p.mutable_grad().reset();  // zero_grad
    EXPECT_FALSE(fsdp->flat_params()[0].grad().defined());
    EXPECT_EQ(&*fsdp->module, &*model);
  });
}

TEST(FullyShardedDataParallel, TakesAC10dProcessGroup) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    FullyShardedDataParallel fsdp(model, {.process_group = me.group()->process_group(), .use_orig_params = true});
    square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    accumulate_means(plain, data, square_loss);
    const auto full = fsdp->summon_full_params({.with_grads = true});
    EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain)), "");
  });
}

// It is a module holder, as DistributedDataParallel is.
TEST(FullyShardedDataParallel, IsAModule) {
  run_ranks(2, [&](Rank&) {
    FullyShardedDataParallel fsdp(MLP(models::mlp_module()), {.use_orig_params = true});
    EXPECT_EQ(fsdp->named_parameters().keys()[0], "module.net1.weight");
    torch::nn::Module& module = *fsdp;
    EXPECT_EQ(fsdp_modules(module).size(), 1u);
    EXPECT_EQ(fsdp->forward(torch::ones({2, 10})).size(0), 2);
  });
}

// One rank, or NO_SHARD: parameters keep their shapes.
TEST(FullyShardedDataParallel, NothingIsShardedOnOneRank) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  for (const int64_t ranks : {1, 2})
    run_ranks(ranks, [&](Rank&) {
      auto plain = clone(start), model = clone(start);
      FullyShardedDataParallel fsdp(
          model, {.sharding_strategy = ranks == 1 ? ShardingStrategy::FullShard : ShardingStrategy::NoShard,
                  .use_orig_params = true});
      CommDebugMode comm;
      square_loss(model, data[0]).backward();
      EXPECT_EQ(comm.get_total_counts(), ranks == 1 ? 0 : 1);
      square_loss(plain, data[0]).backward();
      EXPECT_EQ(close(values_of(*model), values_of(*plain), kExact), "");
      EXPECT_EQ(close(gradients_of(*model), gradients_of(*plain)), "");
    });
}

TEST(FullyShardedDataParallel, NoSyncRestoresTheSetting) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto model = clone(start);
    FullyShardedDataParallel fsdp(model);
    const auto reductions = [&] {
      CommDebugMode comm;
      square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
      return comm.get_comm_counts().of(comm::CommKind::ReduceScatterTensor, comm::Family::C10d);
    };
    {
      const auto outer = fsdp->no_sync();
      { const auto inner = fsdp->no_sync(); }
      EXPECT_EQ(reductions(), 0);
    }
    EXPECT_EQ(reductions(), 1);
    auto plain = clone(start);  // accumulates both passes
    accumulate_means(plain, data, square_loss);
    accumulate_means(plain, data, square_loss);
    EXPECT_EQ(close(fsdp->flat_params()[0].grad(), flattened(gradients_of(*plain)).chunk(2)[me.rank]), "");
  });
}

TEST(FullyShardedDataParallel, IgnoresModulesAndParameters) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  for (const bool use_orig_params : {false, true})
    run_ranks(2, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      FullyShardedDataParallel fsdp(model, {.use_orig_params = use_orig_params,
                                            .ignored_modules = {model->layers[0].get()},
                                            .ignored_parameters = {model->layers[1]->bias}});
      EXPECT_EQ(fsdp->flat_params()[0].numel(), 80);
      const auto& own = data[static_cast<size_t>(me.rank)];
      square_loss(model, own).backward();
      square_loss(plain, own).backward();
      // Gradients of ignored parameters are local.
      EXPECT_EQ(close(model->layers[0]->weight.grad(), plain->layers[0]->weight.grad()), "");
      EXPECT_EQ(close(model->layers[1]->bias.grad(), plain->layers[1]->bias.grad()), "");
      MLP other(models::mlp_module());
      EXPECT_ERROR(UsageError, FullyShardedDataParallel(other, {.ignored_modules = {model->layers[0].get()}}),
                   "Linear is in ignored_modules, but not in MLP");
      EXPECT_ERROR(UsageError, FullyShardedDataParallel(other, {.ignored_parameters = {torch::ones({2, 3})}}),
                   "ignored_parameters has a tensor of shape [2, 3]");
    });
}

struct WithBufferImpl : torch::nn::Cloneable<WithBufferImpl> {
  WithBufferImpl() { reset(); }
  void reset() override {
    mlp = register_module("mlp", MLP(models::mlp_module()));
    scale = register_buffer("scale", torch::full({2}, 3.0));
    steps = register_buffer("steps", torch::zeros({1}, torch::kLong));
  }
  torch::Tensor forward(torch::Tensor x) {
    seen = x.scalar_type();
    return mlp(x.to(torch::kFloat)) * scale[0];
  }
  MLP mlp{nullptr};
  torch::Tensor scale, steps;
  c10::ScalarType seen = torch::kFloat;
};
TESSERA_MODULE(WithBuffer);

TEST(FullyShardedDataParallel, MixedPrecision) {
  const auto data = batches(2);
  for (const bool keep : {false, true})
    for (const bool inner : {false, true})
      run_ranks(2, [&](Rank& me) {
        WithBuffer plain, model;
        const MixedPrecision precision{.param_dtype = at::kBFloat16,
                                       .reduce_dtype = at::kFloat,
                                       .buffer_dtype = at::kBFloat16,
                                       .keep_low_precision_grads = keep,
                                       .cast_forward_inputs = inner};
        FullyShardedDataParallel fsdp(model, {.use_orig_params = true,
                                              .auto_wrap_policy = transformer_auto_wrap_policy<MLP>(),
                                              .mixed_precision = precision});
        EXPECT_EQ(model->scale.scalar_type(), at::kBFloat16);
        EXPECT_EQ(model->steps.scalar_type(), at::kLong);
        c10::ScalarType dtype{};
        const auto forward = [&] { dtype = fsdp(data[static_cast<size_t>(me.rank)]).scalar_type(); };
        if (!inner) {
          EXPECT_ERROR(c10::Error, forward(), "dtype");  // the MLP gets floats, and has bfloat16
        } else {
          forward();
          EXPECT_EQ(dtype, at::kBFloat16);
          EXPECT_EQ(model->seen, at::kBFloat16);  // the root's inputs are cast by default
          fsdp(data[static_cast<size_t>(me.rank)]).to(at::kFloat).pow(2).mean().backward();
          accumulate_means(plain, data, [](auto& m, const at::Tensor& x) { return m(x).pow(2).mean(); });
          const auto full = fsdp->summon_full_params({.with_grads = true});
          for (size_t i = 0; i < 4; i++) {
            EXPECT_EQ(model->parameters()[i].scalar_type(), at::kFloat);
            EXPECT_EQ(close(model->parameters()[i].detach(), plain->parameters()[i].detach(), kExact), "");
            EXPECT_EQ(close(model->parameters()[i].grad(), plain->parameters()[i].grad(), {0.05, 2e-2}), "");
          }
        }
      });
  run_ranks(2, [&](Rank& me) {  // gradients are reduced in bfloat16 and stay bfloat16
    for (const bool keep : {false, true}) {
      MLP model(models::mlp_module());
      FullyShardedDataParallel fsdp(
          model, {.mixed_precision = {.param_dtype = at::kBFloat16, .keep_low_precision_grads = keep}});
      for (int pass = 0; pass < 2; pass++)
        fsdp(data[static_cast<size_t>(me.rank)]).to(at::kFloat).pow(2).mean().backward();
      EXPECT_EQ(fsdp->flat_params()[0].grad().scalar_type(), keep ? at::kBFloat16 : at::kFloat);
      EXPECT_EQ(fsdp->flat_params()[0].scalar_type(), at::kFloat);
    }
  });
}

// Shard, gradient and optimizer state do not share memory with unsharded parameters, also on one rank.
TEST(FullyShardedDataParallel, OffloadedParametersDoNotShareMemoryWithUnshardedOnes) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  for (const int64_t ranks : {1, 2})
    for (const bool use_orig_params : {false, true})
      run_ranks(ranks, [&](Rank& me) {
        auto plain = clone(start), model = clone(start);
        FullyShardedDataParallel fsdp(model, {.offload_params = true, .use_orig_params = use_orig_params});
        optim::SGD plain_opt(plain->parameters(), {.lr = 0.5, .momentum = 0.9}),
            opt(fsdp->parameters(), {.lr = 0.5, .momentum = 0.9});
        Tensors compute;  // references, so that their memory is not reused
        const auto handle = register_forward_hook(*model->layers[0], [&](Module&, const Tensors&, const Tensors&) {
          for (const auto& layer : model->layers) compute.push_back(layer->weight.detach());
        });
        for (int step = 0; step < 2; step++) {
          plain_opt.zero_grad();
          opt.zero_grad();
          accumulate_means(plain, Tensors(data.begin(), data.begin() + ranks), square_loss);
          square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
          plain_opt.step();
          opt.step();
          for (const auto& p : fsdp->parameters()) {
            if (p.numel() == 0) continue;
            const auto row = opt.state(p).at("momentum_buffer");
            for (const auto& lives : {p.detach(), p.grad(), row}) {
              EXPECT_TRUE(lives.is_cpu());
              for (const auto& unsharded : compute) EXPECT_FALSE(lives.is_alias_of(unsharded));
            }
          }
        }
        EXPECT_EQ(compute.size(), 4);
        {
          const SummonFullParams full(*model);
          EXPECT_EQ(close(values_of(*model), values_of(*plain)), "");
          const torch::NoGradGuard no_grad;
          model->layers[0]->bias.fill_(7);
        }
        const SummonFullParams full(*model);
        EXPECT_TRUE((model->layers[0]->bias == 7).all().item<bool>());
      });
}

// Which all-gathers are in flight when a group's backward begins and ends, and how far forward prefetches.
TEST(FullyShardedDataParallel, Prefetches) {
  struct Case {
    bool forward, limit;
    BackwardPrefetch backward;
    std::vector<int64_t> gathers;  // started by the middle of each group's forward and backward, in order
  };
  // Groups: root (without parameters), 0, 1, 2. Backward begins with group 2.
  const std::vector<Case> cases{
      {true, true, BackwardPrefetch::Pre, {2, 3, 3, 5, 6, 6}},
      {false, true, BackwardPrefetch::None, {1, 2, 3, 4, 5, 6}},
      {true, false, BackwardPrefetch::Pre, {3, 3, 3, 6, 6, 6}},
      {true, true, BackwardPrefetch::Post, {2, 3, 3, 4, 5, 6}},
  };
  const auto data = batches(2);
  for (const auto& c : cases)
    run_ranks(2, [&](Rank& me) {
      models::MLPStacked model(3);
      FullyShardedDataParallel fsdp(model, {.auto_wrap_policy = transformer_auto_wrap_policy<MLP>(),
                                            .forward_prefetch = c.forward,
                                            .backward_prefetch = c.backward,
                                            .limit_all_gathers = c.limit});
      fsdp(data[0]).sum().backward();  // records the order
      CommDebugMode comm;
      std::vector<int64_t> seen;
      const auto note = [&] {
        seen.push_back(comm.get_comm_counts().of(comm::CommKind::AllGatherIntoTensor, comm::Family::C10d));
      };
      for (auto& layer : model->layers) {
        register_forward_hook(*layer->layers[0], [&](Module&, const Tensors&, const Tensors& out) {
          note();
          out[0].register_hook([&](const at::Tensor&) { note(); });
        });
      }
      fsdp(data[static_cast<size_t>(me.rank)]).sum().backward();
      EXPECT_EQ(seen, c.gathers);
    });
}

TEST(FullyShardedDataParallel, SyncsOnceWhenNested) {
  run_ranks(2, [](Rank& me) {
    WithBuffer model;
    model->scale.fill_(static_cast<double>(me.rank));
    if (me.rank == 1) model->mlp->layers[0]->weight.data().fill_(9);
    CommDebugMode comm;
    FullyShardedDataParallel fsdp(
        model, {.sync_module_states = true, .auto_wrap_policy = transformer_auto_wrap_policy<MLP>()});
    EXPECT_EQ(comm.get_comm_counts().of(comm::CommKind::Broadcast, comm::Family::C10d), 1 + 2);  // the last: a long
    EXPECT_EQ(comm.get_total_counts(), 3);
    EXPECT_TRUE((model->scale == 0).all().item<bool>());
    const SummonFullParams full(*model);
    EXPECT_EQ(close(values_of(*model), values_of(*MLP(models::mlp_module())), kExact), "");
  });
}

// Deferred parameters are materialized one group at a time and then sharded.
TEST(FullyShardedDataParallel, DeferredInit) {
  run_ranks(2, [](Rank&) {
    tessera::manual_seed(3);
    auto plain = deferred_init([] { return models::MLPStacked(2, models::MLPConfig{.layers = {{"net1", 10, 10}}}); });
    materialize(plain);
    tessera::manual_seed(3);
    auto model = deferred_init([] { return models::MLPStacked(2, models::MLPConfig{.layers = {{"net1", 10, 10}}}); });
    FullyShardedDataParallel fsdp(
        model, {.auto_wrap_policy = transformer_auto_wrap_policy<MLP>(), .device_id = torch::Device(torch::kCPU)});
    EXPECT_EQ(fsdp->flat_params()[0].numel(), 55);
    const SummonFullParams full(*model);
    EXPECT_EQ(close(values_of(*model), values_of(*plain), kExact), "");
  });
}

// Over all ranks, with shards of different sizes, with and without tensor parallelism.
TEST(FullyShardedDataParallel, ClipsTheNormOfAllGradients) {
  const auto data = batches(1);
  for (const char* mesh : {"dp=1", "dp=3", "dp=4", "dp=2,tp=2"})
    for (const double type : {2.0, 1.0, std::numeric_limits<double>::infinity()})
      for (const bool use_orig_params : {false, true}) {
        SCOPED_TRACE(c10::str(mesh, " ", type, use_orig_params));
        const auto shape = parse_mesh_shape(mesh).shape;
        run_ranks(c10::multiply_integers(shape), [&](Rank& me) {
          MLP plain(models::mlp_module()), model(models::mlp_module());
          const auto all = me.mesh(mesh);
          if (shape.size() == 2)
            parallelize_module(model, all["tp"], {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
          FullyShardedDataParallel fsdp(
              model, {.device_mesh = all["dp"],
                      .use_orig_params = use_orig_params,
                      .ignored_parameters = shape.size() == 2 ? Tensors() : Tensors{model->layers[1]->bias}});
          square_loss(model, data[0]).backward();
          square_loss(plain, data[0]).backward();
          const auto wanted = optim::clip_grad_norm_(plain->parameters(), 1e-2, {.norm_type = type});
          EXPECT_EQ(close(fsdp->clip_grad_norm_(1e-2, type), wanted), "");
          const auto again = optim::clip_grad_norm_(plain->parameters(), 1e9, {.norm_type = type});
          CommDebugMode comm;
          EXPECT_EQ(close(fsdp->clip_grad_norm_(1e9, type), again), "");
          EXPECT_EQ(comm.get_total_counts(), shape.size() == 2 ? 1 + 2 : shape[0] > 1);
        });
      }
}

// Parameters that fully_shard has sharded, also over tp, count once.
TEST(FullyShardedDataParallel, ClipsGradientsOfFullyShardedModules) {
  const auto data = batches(1);
  run_ranks(4, [&](Rank& me) {
    MLP plain(models::mlp_module()), model(models::mlp_module());
    const auto mesh = me.mesh("dp=2,tp=2");
    parallelize_module(model, mesh["tp"], {{"net1", ColwiseParallel()}, {"net2", RowwiseParallel()}});
    fully_shard(model->layers[0], {.mesh = mesh["dp"]});
    FullyShardedDataParallel fsdp(model, {.device_mesh = mesh["dp"], .use_orig_params = true});
    square_loss(model, data[0]).backward();
    square_loss(plain, data[0]).backward();
    {
      const auto full = fsdp->summon_full_params({.with_grads = true});
      for (size_t i = 0; i < 4; i++)
        EXPECT_EQ(close(DTensor(model->parameters()[i].grad()).full_tensor(), plain->parameters()[i].grad()), "") << i;
    }
    const auto wanted = optim::clip_grad_norm_(plain->parameters(), 1e-2);
    EXPECT_EQ(close(fsdp->clip_grad_norm_(1e-2), wanted), "");
  });
}

struct ScaledImpl : torch::nn::Cloneable<ScaledImpl> {
  explicit ScaledImpl(torch::Tensor by = torch::ones({})) : scale(register_parameter("scale", std::move(by))) {
    linear = register_module("linear", nn::Linear(4, 4));
  }
  void reset() override {}
  torch::Tensor forward(torch::Tensor x) { return linear(x) * scale; }
  torch::Tensor scale;
  nn::Linear linear{nullptr};
};
TESSERA_MODULE(Scaled);

TEST(FullyShardedDataParallel, Errors) {
  run_ranks(2, [](Rank& me) {
    MLP model(models::mlp_module());
    const auto fsdp_with = [&](const FSDPOptions& options) { FullyShardedDataParallel(model, options); };
    EXPECT_ERROR(UsageError, fsdp_with({.sharding_strategy = ShardingStrategy::HybridShard}),
                 "HYBRID_SHARD needs a device_mesh of two axes");
    EXPECT_ERROR(UsageError, fsdp_with({.device_mesh = me.mesh("a=1,b=2")}), "a=1,b=2 has 2 axes");
    EXPECT_ERROR(UsageError, fsdp_with({.device_mesh = me.mesh("dp=2"), .process_group = me.group()}),
                 "both device_mesh and process_group");
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(Scaled()), "parameter scale is a scalar");
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(Scaled(torch::ones({1}, torch::kDouble))),
                 "parameter linear.weight is Float", "scale is Double");
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(Scaled(torch::empty({1}, torch::kMeta))),
                 "parameter scale is on the meta device");
    Scaled scaled(torch::ones({1}));
    scaled->linear->bias.requires_grad_(false);
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(scaled),
                 "parameter linear.bias does not require a gradient, unlike scale", "set use_orig_params");
    torch::nn::Linear no_hooks(2, 2);
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(no_hooks), "Linear cannot have hooks");
    EXPECT_TRUE(fsdp_modules(*scaled).empty());
    EXPECT_EQ(model->parameters().size(), 4);  // nothing was changed

    const auto mesh = me.mesh("dp=2");
    MLP distributed(models::mlp_module());
    parallelize_module(distributed, mesh, {{"net1", ColwiseParallel()}});
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(distributed, {.device_mesh = mesh}),
                 "parameter net1.weight is DTensor(f32[16, 10]", "over the same ranks");

    FullyShardedDataParallel fsdp(model, {.use_orig_params = true});
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(model), "MLP is sharded already");
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(model->layers[0]),
                 "parameter weight is sharded already, as part of MLP");
    MLP flat(models::mlp_module());
    FullyShardedDataParallel outer(flat);
    EXPECT_ERROR(UsageError, FullyShardedDataParallel(flat->layers[0]),
                 "the parameters of Linear are part of the flat parameter of MLP already");
  });
}

}  // namespace
}  // namespace tessera
