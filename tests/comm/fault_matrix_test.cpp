// Whatever one rank does wrong: all other ranks get an error that names it, in time, and nothing is left behind.
#include "fault_run.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::FaultCase;
using testing::run_fault_cases;

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

int main(int argc, char** argv) { return tessera::testing::fault_test_main(argc, argv); }
