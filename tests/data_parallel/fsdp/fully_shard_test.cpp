#include "tessera/data_parallel/fsdp/fully_shard.h"

#include "tessera/debug/comm_debug_mode.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/models/gpt2.h"
#include "tessera/models/loss.h"
#include "tessera/nn/module_tree.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/data_parallel.h"
#include "tests/fixtures/full_tensor.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;
using comm::CommKind;

TEST(FullyShard, TrainsLikeThePlainModule) {
  const models::MLPStacked start(2);
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const bool reshard : {true, false}) {
      const auto data = batches(ranks);
      run_ranks(ranks, [&](Rank& me) {
        auto plain = clone(start), model = clone(start);
        const FullyShardOptions options{.mesh = me.mesh(c10::str("dp=", ranks)), .reshard_after_forward = reshard};
        for (auto& layer : model->layers) fully_shard(layer, options);
        fully_shard(model, options);
        for (const auto& p : model->parameters()) EXPECT_TRUE(is_dtensor(p));
        optim::SGD plain_opt(plain->parameters(), {.lr = 0.1}), opt(model->parameters(), {.lr = 0.1});
        const auto loss = [](auto& m, const at::Tensor& x) { return m(x).pow(2).mean(); };
        for (int step = 0; step < 3; step++) {
          plain_opt.zero_grad();
          opt.zero_grad();
          accumulate_means(plain, data, loss);
          CommDebugMode comm;
          loss(model, data[static_cast<size_t>(me.rank)]).backward();
          if (ranks > 1) {
            EXPECT_EQ(comm.get_comm_counts().of(CommKind::AllGatherIntoTensor, comm::Family::C10d), reshard ? 4 : 2);
            EXPECT_EQ(comm.get_comm_counts().of(CommKind::ReduceScatterTensor, comm::Family::C10d), 2);
          }
          const auto found = model->parameters(), wanted = plain->parameters();
          for (size_t i = 0; i < found.size(); i++) {
            ASSERT_TRUE(is_dtensor(found[i]));
            EXPECT_EQ(DTensor(found[i].grad()).placements(), DTensor(found[i]).placements());
            EXPECT_EQ(close(full_value(found[i].grad()), wanted[i].grad()), "") << step << " " << i;
          }
          plain_opt.step();
          opt.step();
          for (size_t i = 0; i < found.size(); i++) EXPECT_EQ(close(full_value(found[i]), wanted[i].detach()), "");
        }
      });
    }
}

TEST(FullyShard, ReturnsItsArgument) {
  run_ranks(2, [&](Rank&) {
    models::MLPStacked model(2);
    EXPECT_EQ(&fully_shard(model->layers[0]), &model->layers[0]);
    Module& root = *model;
    EXPECT_EQ(&fully_shard(root), &root);
    fsdp_module(model).set_requires_gradient_sync(false);
    MLP a(models::mlp_module()), b(models::mlp_module());
    EXPECT_EQ(fully_shard({a.ptr(), b.ptr()}).size(), 2u);
  });
}

TEST(FullyShard, WithoutAMeshTakesAllRanksAndTheDeviceOfTheParameters) {
  run_ranks(2, [&](Rank&) {
    MLP model(models::mlp_module());
    fully_shard(model);
    const auto mesh = DTensor(model->layers[0]->weight.detach()).device_mesh();
    EXPECT_EQ(mesh.size(), 2);
    EXPECT_EQ(c10::Device(mesh.device_type()).type(), at::kCPU);
  });
}

TEST(FullyShard, ShardPlacementFnChoosesTheDim) {
  const MLP start(models::mlp_module());
  const auto data = batches(3);
  run_ranks(3, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    fully_shard(model,
                {.mesh = me.mesh("dp=3"),
                 .shard_placement_fn = [](const at::Tensor& p) -> std::optional<int64_t> { return p.dim() - 1; }});
    EXPECT_EQ(DTensor(model->layers[0]->weight).placements()[0], Shard(1));
    model(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
    accumulate_means(plain, data, square_loss);
    for (size_t i = 0; i < 4; i++)
      EXPECT_EQ(close(full_value(model->parameters()[i].grad()), plain->parameters()[i].grad()), "") << i;
  });
}

TEST(FullyShard, ComputesInLowPrecision) {
  const MLP start(models::mlp_module());
  const auto data = batches(2);
  run_ranks(2, [&](Rank& me) {
    auto plain = clone(start), model = clone(start);
    fully_shard(model,
                {.mesh = me.mesh("dp=2"), .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}});
    const auto y = model(data[static_cast<size_t>(me.rank)].to(at::kBFloat16));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.to(at::kFloat).pow(2).mean().backward();
    accumulate_means(plain, data, square_loss);
    for (size_t i = 0; i < 4; i++) {
      EXPECT_EQ(model->parameters()[i].scalar_type(), at::kFloat);
      EXPECT_EQ(close(full_value(model->parameters()[i].grad()), plain->parameters()[i].grad(), {0.05, 5e-3}), "") << i;
    }
  });
}

TEST(FullyShard, Gpt2) {
  const models::GPT2Config config{.vocab_size = 13, .max_seq_len = 8, .n_layer = 2, .n_head = 4, .n_embd = 16};
  torch::manual_seed(7);
  models::GPT2 start(config);
  const auto tokens = torch::randint(13, {4, 7}, torch::kLong), targets = torch::randint(13, {4, 7}, torch::kLong);
  for (const char* shape : {"dp=2", "dp=4", "replicate=2,shard=2"}) {
    const auto ranks = std::string(shape) == "dp=2" ? 2 : 4;
    run_ranks(ranks, [&](Rank& me) {
      auto plain = clone(start), model = clone(start);
      const FullyShardOptions options{.mesh = me.mesh(shape)};
      for (auto& block : model->h) fully_shard(block, options);
      fully_shard(model, options);
      optim::AdamW plain_opt(plain->parameters(), {.lr = 0.01, .eps = 1e-5}),
          opt(model->parameters(), {.lr = 0.01, .eps = 1e-5});
      const auto mine = [&](const at::Tensor& t) { return t.chunk(ranks)[me.rank]; };
      for (int step = 0; step < 4; step++) {
        plain_opt.zero_grad();
        opt.zero_grad();
        const auto expected = models::loss(plain(tokens), targets);
        expected.backward();
        const auto loss = models::loss(model(mine(tokens)), mine(targets));
        loss.backward();
        auto mean = loss.detach() / ranks;
        me.group()->all_reduce(mean, ReduceOp::Sum).wait();
        EXPECT_NEAR(mean.item<double>(), expected.item<double>(), 1e-5) << step;
        plain_opt.step();
        opt.step();
      }
    });
  }
}

}  // namespace
}  // namespace tessera
