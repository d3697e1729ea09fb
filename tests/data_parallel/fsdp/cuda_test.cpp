// Sharded training on a GPU that two ranks share: their collectives are staged through shared memory.
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/data_parallel/fsdp/fully_sharded_data_parallel.h"
#include "tessera/data_parallel/fsdp/state_dict.h"
#include "tessera/optim/clip_grad.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/spawn.h"
#include "tests/fixtures/data_parallel.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;

void trains_like_the_plain_module(Rank& me, const FSDPOptions& options) {
  SCOPED_TRACE(c10::str(options.sharding_strategy, options.offload_params, options.use_orig_params));
  const torch::Device device(at::kCUDA, 0);
  const MLP start(models::mlp_module());
  auto data = batches(2);
  for (auto& batch : data) batch = batch.to(device);
  auto plain = clone(start, device), model = clone(start);  // device_id moves it
  FullyShardedDataParallel fsdp(model, options);
  optim::SGD plain_opt(plain->parameters(), {.lr = 0.5, .momentum = 0.9}),
      opt(fsdp->parameters(), {.lr = 0.5, .momentum = 0.9});
  for (int step = 0; step < 3; step++) {
    plain_opt.zero_grad();
    opt.zero_grad();
    accumulate_means(plain, data, square_loss);
    square_loss(model, data[static_cast<size_t>(me.rank)]).backward();
    const auto flat = fsdp->flat_params()[0];
    EXPECT_EQ(flat.is_cpu(), options.offload_params);
    EXPECT_EQ(flat.is_pinned(), options.offload_params);
    EXPECT_EQ(flat.grad().is_cpu(), options.offload_params);
    const auto wanted = optim::clip_grad_norm_(plain->parameters(), 0.05);
    EXPECT_EQ(close(fsdp->clip_grad_norm_(0.05).cpu(), wanted.cpu()), "");
    plain_opt.step();
    opt.step();
    for (const auto& p : fsdp->parameters())
      for (const auto& [name, row] : opt.state(p)) EXPECT_EQ(row.is_cpu(), options.offload_params) << name;
  }
  {
    const SummonFullParams full(*model, {.offload_to_cpu = true});
    for (size_t i = 0; i < 4; i++) {
      EXPECT_TRUE(model->parameters()[i].is_cpu());
      EXPECT_EQ(close(model->parameters()[i].detach(), plain->parameters()[i].detach().cpu()), "");
    }
    const torch::NoGradGuard no_grad;
    model->layers[0]->bias.fill_(7);
    plain->layers[0]->bias.fill_(7);
  }
  const auto dict = get_model_state_dict(*model, {.full_state_dict = true, .cpu_offload = true});
  for (const auto& [name, value] : state_dict(*plain)) EXPECT_EQ(close(dict.at(name), value.cpu()), "") << name;
}

// fully_shard() with CPU offload: shards are pinned if asked for, and training has the losses of the plain module.
void offloads(Rank& me, bool pinned) {
  const torch::Device device(at::kCUDA, 0);
  const MLP start(models::mlp_module());
  auto data = batches(2);
  for (auto& batch : data) batch = batch.to(device);
  auto plain = clone(start, device), model = clone(start, device);
  fully_shard(model, {.mesh = init_device_mesh(me.world, "cuda", {2}, {"dp"}),
                      .mp_policy = {.param_dtype = at::kBFloat16},
                      .offload_policy = CPUOffloadPolicy(pinned)});
  plain->to(at::kBFloat16);
  for (const auto& p : model->parameters()) EXPECT_EQ(DTensor(p).to_local().is_pinned(), pinned);
  for (int step = 0; step < 3; step++) {
    const at::NoGradGuard no_grad;
    const auto x = data[static_cast<size_t>(me.rank)];
    EXPECT_EQ(close(model(x), plain(x.to(at::kBFloat16)), {1e-2, 1e-2}), "") << "step " << step;
    for (const auto& p : plain->parameters()) p.add_(0.125);
    for (const auto& p : model->parameters()) p.add_(0.125);
  }
}

TEST(FsdpCuda, TrainsLikeThePlainModule) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device on this machine, or a build without CUDA";
  testing::spawn_ranks(2,
                       [](Rank& me) {
                         MLP model(models::mlp_module());
                         model->to(torch::Device(at::kCUDA, 0));
                         fully_shard(model);  // without a mesh: on the device of the parameters
                         EXPECT_TRUE(model->layers[0]->weight.is_cuda());
                         for (const bool pinned : {false, true}) offloads(me, pinned);
                         for (const auto strategy :
                              {ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp, ShardingStrategy::NoShard})
                           for (const bool offload : {false, true})
                             for (const bool use_orig_params : {false, true})
                               trains_like_the_plain_module(me, {.sharding_strategy = strategy,
                                                                 .offload_params = offload,
                                                                 .use_orig_params = use_orig_params,
                                                                 .sync_module_states = true,
                                                                 .device_id = torch::Device(at::kCUDA, 0)});
                       },
                       {.backend = "shm"});
}

}  // namespace
}  // namespace tessera
