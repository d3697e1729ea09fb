// fully_shard of parameters that are sharded by tensor parallelism already: each is one DTensor over all axes. Also for
// uneven sizes.
#include "tessera/data_parallel/fsdp/detail/engine/joint_spec.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/llama.h"
#include "tessera/models/loss.h"
#include "tessera/models/sizes.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/sgd.h"
#include "tessera/state/state_dict.h"
#include "tessera/tensor_parallel/parallelize_module.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/fsdp.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;
using comm::Family;
using models::Activation;

constexpr testing::Tolerance kLoose{1e-4, 1e-5};

// 13 features in the middle: shards of 7 and 6 over tp, and of 4 3 and 3 3 over dp.
models::MLPConfig uneven() { return {.layers = {{"up", 6, 13, Activation::Relu}, {"down", 13, 5}}, .seed = 11}; }

struct Case {
  const char* mesh;
  std::vector<std::string> dp;
  const char* up;         // placements of up.weight, sharded along dim 0 by both
  const char* down;       // of down.weight: tp shards dim 1, dp shards dim 0
  const char* down_bias;  // replicated over tp
};

TEST(FullyShardTensorParallel, UnevenSizesOverTwoAndThreeAxes) {
  const Case cases[] = {
      {"dp=2,tp=2", {"dp"}, "[SS(0,2), S(0)]", "[S(0), S(1)]", "[S(0), R]"},
      {"tp=2,dp=2", {"dp"}, "[S(0), S(0)]", "[S(1), S(0)]", "[R, S(0)]"},  // tp shards first
      {"replicate=2,shard=1,tp=2", {"replicate", "shard"}, "[R, SS(0,2), S(0)]", "[R, S(0), S(1)]", "[R, S(0), R]"},
      {"replicate=1,shard=2,tp=2", {"replicate", "shard"}, "[R, SS(0,2), S(0)]", "[R, S(0), S(1)]", "[R, S(0), R]"},
      {"replicate=2,shard=2,tp=1", {"replicate", "shard"}, "[R, S(0), S(0)]", "[R, S(0), S(1)]", "[R, S(0), R]"},
  };
  const MLP start(uneven());
  const auto all = batches(4, {4, 6});
  for (const auto& [shape, dp, up, down, down_bias] : cases) {
    SCOPED_TRACE(shape);
    run_ranks(4, [&, &shape = shape, &dp = dp, &up = up, &down = down, &down_bias = down_bias](Rank& me) {
      const auto mesh = me.mesh(shape);
      int64_t dp_rank = 0, dp_size = 1;
      for (const auto& axis : dp) {
        dp_rank = dp_rank * mesh.size(axis) + mesh.get_local_rank(axis);
        dp_size *= mesh.size(axis);
      }
      const Tensors data(all.begin(), all.begin() + dp_size);
      auto plain = clone(start), model = clone(start);
      parallelize_module(model, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
      fully_shard(model, {.mesh = mesh[dp]});
      const auto named = model->named_parameters();
      EXPECT_EQ(to_string(DTensor(named["up.weight"]).placements()), up);
      EXPECT_EQ(to_string(DTensor(named["down.weight"]).placements()), down);
      EXPECT_EQ(to_string(DTensor(named["down.bias"]).placements()), down_bias);
      EXPECT_EQ(named["up.weight"].sizes(), (std::vector<int64_t>{13, 6}));
      const auto before = state_dict(*model);
      for (const auto& item : plain->named_parameters())
        EXPECT_EQ(close(full_value(before.at(item.key())), item.value().detach()), "") << item.key();

      optim::SGD plain_opt(plain->parameters(), {.lr = 0.1}), opt(model->parameters(), {.lr = 0.1});
      for (int step = 0; step < 2; step++) {
        plain_opt.zero_grad();
        opt.zero_grad();
        // Twice, so that gradients accumulate.
        for (int pass = 0; pass < 2; pass++) {
          accumulate_means(plain, data, square_loss);
          CommDebugMode comm;
          square_loss(model, data[static_cast<size_t>(dp_rank)]).backward();
          const auto& counts = comm.get_comm_counts();
          const bool sharded = mesh.size(dp.back()) > 1;
          EXPECT_EQ(counts.of(CommKind::AllGatherIntoTensor, Family::C10d), sharded);  // the root stays unsharded
          EXPECT_EQ(counts.of(CommKind::ReduceScatterTensor, Family::C10d), sharded);
          EXPECT_EQ(counts.of(CommKind::AllReduce, Family::C10d), dp.size() > 1 && mesh.size(dp[0]) > 1);
        }
        const auto wanted = plain->named_parameters();
        for (const auto& item : model->named_parameters()) {
          const auto& p = item.value();
          EXPECT_EQ(DTensor(p.grad()).placements(), DTensor(p).placements()) << item.key();
          EXPECT_EQ(close(full_value(p.grad()), wanted[item.key()].grad(), kLoose), "") << item.key();
        }
        const auto norm = optim::clip_grad_norm_(model->parameters(), 0.05);
        const auto plain_norm = optim::clip_grad_norm_(plain->parameters(), 0.05);
        EXPECT_EQ(close(norm, plain_norm, kLoose), "");
        opt.step();
        plain_opt.step();
        for (const auto& item : model->named_parameters())
          EXPECT_EQ(close(full_value(item.value()), wanted[item.key()].detach(), kLoose), "") << item.key();
      }
    });
  }
}

// Sequence parallelism: norms are replicated over tp, and each rank has the gradient of its part of the sequence.
TEST(FullyShardTensorParallel, LlamaWithSequenceParallel) {
  auto config = kTinyLlama;
  config.ffn_dim = 22;  // local shards of odd size
  torch::manual_seed(7);
  models::Llama start(config);
  fill_uniform(*start);
  const auto batch = random_tokens(4, 8);
  const auto &tokens = batch.tokens, &targets = batch.targets;
  run_ranks(4, [&](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    auto plain = clone(start), model = clone(start);
    parallelize_module(*model, mesh["tp"], models::tensor_parallel_plan(config, {.sequence_parallel = true}));
    shard_blocks(model, {.mesh = mesh["dp"]});
    const auto mine = [&](const at::Tensor& t) { return t.chunk(2)[mesh.get_local_rank("dp")]; };
    optim::SGD plain_opt(plain->parameters(), {.lr = 0.1}), opt(model->parameters(), {.lr = 0.1});
    for (int step = 0; step < 3; step++) {
      plain_opt.zero_grad();
      opt.zero_grad();
      models::loss(plain(tokens), targets).backward();
      models::loss(model(mine(tokens)), mine(targets)).backward();
      const auto wanted = plain->named_parameters();
      for (const auto& item : model->named_parameters())
        EXPECT_EQ(close(full_value(item.value().grad()), wanted[item.key()].grad(), kLoose), "") << step << item.key();
      plain_opt.step();
      opt.step();
    }
  });
}

TEST(FullyShardTensorParallel, ErrorsForParametersThatCannotBeShardedOnceMore) {
  run_ranks(4, [](Rank& me) {
    const auto mesh = me.mesh("dp=2,tp=2");
    const auto refused = [&](const DeviceMesh& over, PlacementsRef placements, const DeviceMesh& dp) {
      MLP model(models::mlp_module());
      distribute_in_place(model->layers[1]->weight, over, placements);
      const auto said = testing::error_message<UsageError>([&] { fully_shard(model, {.mesh = dp}); });
      EXPECT_CONTAINS(said, "net2.weight");
      EXPECT_FALSE(is_dtensor(model->layers[0]->weight));  // nothing was changed
      return said;
    };
    EXPECT_CONTAINS(refused(mesh, {Replicate(), Shard(0)}, mesh["dp"]), "uses the axis 'dp'");
    EXPECT_CONTAINS(refused(me.mesh("x=4"), {Shard(0)}, mesh["dp"]), "slice both from one");
    EXPECT_CONTAINS(refused(me.mesh(std::vector<int64_t>{4}), {Shard(0)}, mesh["dp"]),
                    "the axes of both meshes need names");
  });
}

}  // namespace
}  // namespace tessera
