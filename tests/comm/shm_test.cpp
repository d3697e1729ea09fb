// The collectives over shared memory, in processes.
#include "every_collective.h"
#include "tessera/testing/spawn.h"

namespace tessera {
namespace {

using testing::Rank;
using testing::spawn_ranks;

TEST(Shm, EveryCollectiveOnTwo) { spawn_ranks(2, testing::every_collective, {.backend = "shm"}); }
TEST(Shm, EveryCollectiveOnFour) { spawn_ranks(4, testing::every_collective, {.backend = "shm"}); }

}  // namespace
}  // namespace tessera
