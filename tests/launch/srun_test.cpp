// Started by Slurm's srun: a Slurm of one node, for the length of the test (slurm.sh).
#include "tessera/testing/message_of.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

TEST(Srun, RanksMeet) {
  const auto ran = shell(TESSERA_LAUNCH_TESTS "/slurm.sh sh -c 'srun -n 3 \"$PROBE\" sum; srun -n 1 \"$PROBE\" sum'");
  if (ran.exit_code == 77) GTEST_SKIP() << ran.text;
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  for (int rank = 0; rank < 3; rank++)
    EXPECT_SAYS(ran.text, c10::str("sum 6 on rank ", rank, " of 3, ", rank, " of 3 here; Slurm"));
  EXPECT_SAYS(ran.text, "sum 1 on rank 0 of 1");
}

}  // namespace
}  // namespace tessera::testing
