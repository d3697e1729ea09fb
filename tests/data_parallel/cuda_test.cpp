// Data parallelism on a GPU that two ranks share: their collectives are staged through shared memory.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/spawn.h"
#include "tests/fixtures/data_parallel.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;

TEST(Cuda, TwoRanksShareADevice) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device on this machine, or a build without CUDA";
  testing::spawn_ranks(2,
                       [](Rank& me) {
                         const MLP start(models::mlp_module());
                         auto data = batches(2);
                         for (auto& batch : data) batch = batch.to(at::kCUDA);
                         auto plain = clone(start, torch::Device(at::kCUDA)),
                              model = clone(start, torch::Device(at::kCUDA));
                         DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb});
                         optim::SGD plain_opt(plain->parameters(), {.lr = 0.5}), opt(ddp->parameters(), {.lr = 0.5});
                         for (int step = 0; step < 3; step++) {
                           plain_opt.zero_grad();
                           opt.zero_grad();
                           accumulate_means(plain, data, square_loss);
                           ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
                           EXPECT_TRUE(model->layers[0]->weight.grad().is_cuda());
                           EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain)), "") << "step " << step;
                           plain_opt.step();
                           opt.step();
                         }
                       },
                       {.backend = "shm"});
}

}  // namespace
}  // namespace tessera
