// Data parallelism on a GPU that two ranks share: their collectives are staged through shared memory.
#include "tessera/testing/spawn.h"
#include "tests/fixtures/ddp.h"

#include <ATen/Context.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;

TEST(Cuda, TwoRanksShareADevice) {
  if (!at::globalContext().hasCUDA()) GTEST_SKIP() << "no CUDA device on this machine, or a build without CUDA";
  testing::spawn_ranks(2,
                       [](Rank& me) {
                         const auto start = mlp();
                         auto data = batches(2);
                         for (auto& batch : data) batch = batch.to(at::kCUDA);
                         train_ddp_beside_plain(start, data, me.rank, {.bucket_cap_mb = kTinyMb}, at::kCUDA,
                                                [](int, const auto& ddp, const CommDebugMode&) {
                                                  EXPECT_TRUE(ddp->parameters()[0].grad().is_cuda());
                                                });
                       },
                       {.backend = "shm"});
}

}  // namespace
}  // namespace tessera
