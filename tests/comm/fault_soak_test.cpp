// Random cases of the fault matrix, and ranks killed at random times, also while they connect: all ranks end, and
// nothing is left behind. `make soak` runs a thousand cases.
#include "fault_run.h"
#include "tessera/base/detail/settings.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera {
namespace {

using testing::FaultCase;

TEST(FaultSoak, RandomCases) {
  const int count = setting("TESSERA_SOAK") == "1" ? 1000 : 8;
  std::mt19937 random(count);
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<FaultCase> fault_cases;
  for (int i = 0; i < count; i++) {
    FaultCase fault_case;
    const int fault = up_to(std::size(testing::kFaults) * 2);
    fault_case.fault =
        fault < static_cast<int>(std::size(testing::kFaults)) ? testing::kFaults[fault].name : "kill any time";
    fault_case.backend = up_to(2) ? "shm" : "gloo";
    fault_case.collective = testing::kCollectives[up_to(std::size(testing::kCollectives))].name;
    fault_case.ranks = 2 + up_to(3);
    fault_case.faulty_rank = up_to(fault_case.ranks);
    fault_case.rounds = 1 + up_to(20);  // after one round all ranks have joined
    fault_case.kill_after_ms = up_to(1500);
    fault_cases.push_back(fault_case);
  }
  for (const auto& wrong : testing::run_fault_cases(fault_cases, 4)) ADD_FAILURE() << wrong;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) { return tessera::testing::fault_test_main(argc, argv); }
