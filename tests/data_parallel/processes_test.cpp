// Data parallelism between processes, with each backend.
#include "tessera/testing/spawn.h"
#include "tests/fixtures/ddp.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;

void train(int64_t ranks, const char* backend) {
  const auto start = mlp();
  const auto data = batches(ranks);
  testing::spawn_ranks(ranks,
                       [&](Rank& me) {
                         EXPECT_EQ(me.world.backend(), backend);
                         train_ddp_beside_plain(start, data, me.rank, {.bucket_cap_mb = kTinyMb}, at::kCPU,
                                                [](int step, const auto&, const CommDebugMode& comm) {
                                                  EXPECT_EQ(comm.get_total_counts(), step == 0 ? 1 : 2);
                                                });
                       },
                       {.backend = backend});
}

TEST(DataParallelProcesses, TwoOverSharedMemory) { train(2, "shm"); }
TEST(DataParallelProcesses, FourOverSharedMemory) { train(4, "shm"); }
TEST(DataParallelProcesses, TwoOverGloo) { train(2, "gloo"); }
TEST(DataParallelProcesses, FourOverGloo) { train(4, "gloo"); }

}  // namespace
}  // namespace tessera
