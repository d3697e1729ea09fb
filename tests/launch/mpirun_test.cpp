// Ranks started by Open MPI's mpirun (Debian: openmpi-bin), if installed. mpirun sets ranks but no store address.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

TEST(Mpirun, RanksFormOneWorld) {
  if (shell("mpirun --version | grep -q 'Open MPI'").exit_code != 0)
    GTEST_SKIP() << "Open MPI's mpirun is not installed (openmpi-bin)";
  // Two jobs at the same time stay separate.
  const auto ran = shell(
      "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1;"
      "mpirun --oversubscribe -n 3 \"$PROBE\" twice & mpirun --oversubscribe -n 2 \"$PROBE\" sum & wait");
  for (int rank = 0; rank < 3; rank++)
    EXPECT_EQ(count(ran.text, c10::str("sum 6 on rank ", rank, " of 3, ", rank, " of 3 here; Open MPI")), 2)
        << ran.text;
  for (int rank = 0; rank < 2; rank++) EXPECT_CONTAINS(ran.text, c10::str("sum 3 on rank ", rank, " of 2"));
}

}  // namespace
}  // namespace tessera::testing
