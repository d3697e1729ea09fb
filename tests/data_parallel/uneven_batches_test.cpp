// Ranks with different numbers of batches: ranks with more batches get an error that names the rank that stopped. They
// do not wait for a time-out.
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/testing/spawn.h"
#include "tests/fixtures/data_parallel.h"

namespace tessera {
namespace {

using namespace fixtures;

constexpr int64_t kUnevenRanks = 3, kShort = 1;

// Rank 1 has two batches, the others have four.
void train_uneven(Rank& me) {
  models::MLP model(models::mlp_module());
  DistributedDataParallel ddp(model);
  torch::manual_seed(me.rank);
  for (int64_t i = 0; i < (me.rank == kShort ? 2 : 4); i++) ddp(torch::randn({4, 10})).pow(2).mean().backward();
}

void expect_named(const std::string& report, const std::vector<int64_t>& left_over) {
  for (const int64_t r : left_over) {
    const size_t at = report.find("backward pass 3, gradients of", report.find(c10::str("\nrank ", r)));
    EXPECT_NE(at, std::string::npos) << "rank " << r << " has no error in the third pass:" << report;
  }
  for (const char* part : {"rank 1 has left group 'world'", "rank 1 stopped after 2 backward passes"})
    EXPECT_NE(report.find(part), std::string::npos) << part << " is not in: " << report;
  for (const char* part : {"waited", "rank 0 stopped", "rank 2 stopped"})
    EXPECT_EQ(report.find(part), std::string::npos) << "a time-out, or a wrong rank: " << report;
}

TEST(UnevenBatches, Threads) {
  std::string report = "nobody failed";
  try {
    testing::run_ranks(kUnevenRanks, train_uneven);
  } catch (const std::exception& error) {
    report = error.what();
  }
  expect_named(report, {0, 2});
}

void expect_named_by_processes(const char* backend) {
  std::string report = "nobody failed";
  try {
    testing::spawn_ranks(kUnevenRanks,
                         [](Rank& me) {
                           train_uneven(me);
                           destroy();
                           std::_Exit(0);  // exits like a finished program, without the last barrier of run_ranks
                         },
                         {.backend = backend});
  } catch (const std::exception& error) {
    report = error.what();
  }
  expect_named(report, {0, 2});
}
TEST(UnevenBatches, Shm) { expect_named_by_processes("shm"); }
TEST(UnevenBatches, Gloo) { expect_named_by_processes("gloo"); }

}  // namespace
}  // namespace tessera
