// A process that ends in the middle of a schedule: its peers report it within a second, with the stage, the microbatch
// and the action that they expected of it.
#include "tessera/base/error.h"
#include "tessera/pipelining/schedule.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <regex>

namespace tessera::pipelining {
namespace {

using tessera::testing::Rank;

constexpr int64_t kRanks = 4, kLost = 2, kMicrobatches = 8, kLastMicrobatch = 3;

int64_t steady_ms() {  // the same clock in all processes of a host
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The stage of a rank. That of rank kLost ends its process in the forward of microbatch kLastMicrobatch.
PipelineStage stage_of(int64_t rank, const std::string& file) {
  auto w = torch::ones({4}).requires_grad_();
  auto forwards = std::make_shared<int64_t>(0);
  return {[=](const at::Tensor& x) {
            if (rank == kLost && (*forwards)++ == kLastMicrobatch) {
              std::ofstream(file) << steady_ms() << std::endl;
              std::_Exit(9);
            }
            return x * w;
          },
          {w},
          rank,
          kRanks};
}

TEST(RankLoss, IsNamedWithStageMicrobatchAndAction) {
  const char* file_of_run = std::getenv("TESSERA_RANK_LOSS_FILE");  // the children have that of the parent
  const std::string file = file_of_run ? file_of_run : ::testing::TempDir() + c10::str("rank_loss_", getpid());
  setenv("TESSERA_RANK_LOSS_FILE", file.c_str(), 1);
  const auto run = [&] {
    tessera::testing::spawn_ranks(
        kRanks,
        [&](Rank& me) {
          Schedule1F1B schedule(
              {stage_of(me.rank, file)}, kMicrobatches,
              [](const at::Tensor& y, const at::Tensor& t) { return (y - t).square().mean(); }, me.group());
          const auto x = torch::ones({kMicrobatches, 4});
          std::string message;
          try {
            schedule.step(x, x);
          } catch (const CommError& error) {
            message = error.what();
          }
          const int64_t now = steady_ms();
          int64_t lost_at = 0;
          std::ifstream(file) >> lost_at;
          EXPECT_LT(now - lost_at, 1000) << "rank " << me.rank;
          EXPECT_CONTAINS(message, "rank 2");
          // The last stage waits for activations, the others for the gradients, which depend on them. A send is
          // asynchronous: those before the loss may have arrived or not, so the microbatch is any of 0 to 3.
          const std::regex expected(me.rank == 3 ? "waited for 2SEND_F[0-3] of rank 2" : "2SEND_B[0-7]");
          EXPECT_TRUE(std::regex_search(message, expected)) << message;
          EXPECT_CONTAINS(message, "in the pipeline schedule 1F1B");
          std::cout.flush();
          std::_Exit(::testing::Test::HasFailure() ? 10 : 0);  // the barrier at the end needs all ranks
        },
        {.backend = "shm"});
  };
  try {
    run();
    ADD_FAILURE() << "the lost process was not noticed";
  } catch (const std::exception& error) {
    const std::string text = error.what();
    EXPECT_CONTAINS(text, "rank 2");
    EXPECT_EQ(text.find(": Failure"), std::string::npos) << text;  // of an expectation in a child
  }
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace tessera::pipelining
