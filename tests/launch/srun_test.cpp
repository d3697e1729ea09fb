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

// The scripts of examples/slurm as they are, on the one node there is here.
TEST(Sbatch, RunsTheExamples) {
  const std::string job = "sbatch --wait --quiet --nodes=1 --chdir=$out --output=$out/%j.out --ntasks-per-node=";
  const std::string at = "$examples/", python = TESSERA_TORCH_PYTHON;
  const auto ran =
      shell("examples=" TESSERA_LAUNCH_TESTS "/../../examples/slurm out=$(mktemp -d) && export examples out" +
            (python.empty() ? "" : " PATH=$(dirname " + python + "):$PATH") +
            " && trap 'rm -rf $out' EXIT; " TESSERA_LAUNCH_TESTS "/slurm.sh sh -c '" +  //
            job + "2 " + at + "own_program.sbatch $PROBE sum; " +                       //
            job + "2 --cpus-per-task=1 " + at + "train.sbatch --mesh dp=2 --layers 1 --steps 3; " + job + "1 " + at +
            "torchrun.sbatch $PROBE sum; cat $out/*.out; ls $out/outputs/*'");
  if (ran.exit_code == 77) GTEST_SKIP() << ran.text;
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  EXPECT_SAYS(ran.text, "sum 3 on rank 1 of 2, 1 of 2 here; Slurm");
  EXPECT_SAYS(ran.text, "on 2 ranks, mesh dp=2");  // the plan
  EXPECT_SAYS(ran.text, "step:  1  loss");
  EXPECT_SAYS(ran.text, "metrics.jsonl");
  if (!python.empty()) {
    EXPECT_SAYS(ran.text, "sum 3 on rank 1 of 2, 1 of 2 here; environment");
  }
}

}  // namespace
}  // namespace tessera::testing
