// Data parallelism between processes, with each backend.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/optim/sgd.h"
#include "tessera/testing/assert_close.h"
#include "tessera/testing/spawn.h"
#include "tests/fixtures/data_parallel.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace fixtures;

void train(int64_t ranks, const char* backend) {
  const MLP start(models::mlp_module());
  const auto data = batches(ranks);
  testing::spawn_ranks(
      ranks,
      [&](Rank& me) {
        EXPECT_EQ(me.world.backend(), backend);
        auto plain = clone(start), model = clone(start);
        DistributedDataParallel ddp(model, {.bucket_cap_mb = kTinyMb});
        optim::SGD plain_opt(plain->parameters(), {.lr = 0.5}), opt(ddp->parameters(), {.lr = 0.5});
        for (int step = 0; step < 3; step++) {
          plain_opt.zero_grad();
          opt.zero_grad();
          accumulate_means(plain, data, square_loss);
          CommDebugMode comm;
          ddp(data[static_cast<size_t>(me.rank)]).pow(2).mean().backward();
          EXPECT_EQ(comm.get_total_counts(), step == 0 ? 1 : 2);
          EXPECT_EQ(close(gradients_of(*ddp), gradients_of(*plain), ranks == 2 ? kExact : testing::Tolerance{}), "")
              << "step " << step;
          plain_opt.step();
          opt.step();
        }
      },
      {.backend = backend});
}

TEST(DataParallelProcesses, TwoOverSharedMemory) { train(2, "shm"); }
TEST(DataParallelProcesses, FourOverSharedMemory) { train(4, "shm"); }
TEST(DataParallelProcesses, TwoOverGloo) { train(2, "gloo"); }
TEST(DataParallelProcesses, FourOverGloo) { train(4, "gloo"); }

}  // namespace
}  // namespace tessera
