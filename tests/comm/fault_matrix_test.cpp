// Whatever one rank does wrong, all others get an error that names it, in time, and nothing is left behind.
#include "fault_run.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using testing::Cell;
using testing::run_cells;

TEST(FaultMatrix, EveryCell) {
  std::vector<Cell> cells;
  for (const auto& fault : testing::kFaults)
    for (const char* backend : {"shm", "gloo"})
      for (const auto& collective : testing::kCollectives) cells.push_back({fault.name, backend, collective.name});
  ASSERT_EQ(cells.size(), 8 * 2 * 3);
  for (const auto& wrong : run_cells(cells, 6)) ADD_FAILURE() << wrong;  // they mostly wait
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::testing::run_if_cell(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
