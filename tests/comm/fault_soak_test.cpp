// Random cells of the fault matrix, and ranks killed at random moments, while they connect too: everybody ends, and
// nothing is left behind. The long form (make soak) runs a thousand.
#include "fault_run.h"
#include "tessera/base/detail/settings.h"

#include <gtest/gtest.h>

#include <random>

namespace tessera {
namespace {

using testing::Cell;

TEST(FaultSoak, RandomCells) {
  const int count = setting("TESSERA_SOAK") == "1" ? 1000 : 8;
  std::mt19937 random(count);
  const auto up_to = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<Cell> cells;
  for (int i = 0; i < count; i++) {
    Cell cell;
    const int fault = up_to(std::size(testing::kFaults) * 2);
    cell.fault = fault < static_cast<int>(std::size(testing::kFaults)) ? testing::kFaults[fault].name : "kill any time";
    cell.backend = up_to(2) ? "shm" : "gloo";
    cell.collective = testing::kCollectives[up_to(std::size(testing::kCollectives))].name;
    cell.ranks = 2 + up_to(3);
    cell.culprit = up_to(cell.ranks);
    cell.rounds = 1 + up_to(20);  // after one, all of them have joined
    cell.kill_after_ms = up_to(1500);
    cells.push_back(cell);
  }
  for (const auto& wrong : testing::run_cells(cells, 4)) ADD_FAILURE() << wrong;
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::testing::run_if_cell(argc, argv);
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
