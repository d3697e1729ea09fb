// Whatever one rank does wrong: all other ranks get an error that names it, in time, and nothing is left behind.
#include "fault_run.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::FaultCase;
using testing::run_fault_cases;

// Not a test: the processes that run_fault_cases() starts run it. The last eight arguments are those of run_fault_rank.
TEST(FaultRank, DISABLED_RunsOneRankOfACase) {
  const auto arguments = ::testing::internal::GetArgvs();
  if (arguments.size() < 9) GTEST_SKIP() << "only for processes that run_fault_cases() starts";
  testing::run_fault_rank({arguments.end() - 8, arguments.end()});
}

TEST(FaultMatrix, EveryCase) {
  std::vector<FaultCase> fault_cases;
  for (const auto& fault : testing::kFaults)
    for (const char* backend : {"shm", "gloo"})
      for (const auto& collective : testing::kCollectives)
        fault_cases.push_back({fault.name, backend, collective.name});
  ASSERT_EQ(fault_cases.size(), 8 * 2 * 3);
  for (const auto& wrong : run_fault_cases(fault_cases, 6)) ADD_FAILURE() << wrong;  // the processes mostly wait
}

}  // namespace
}  // namespace tessera
