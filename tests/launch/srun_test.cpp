// Ranks started by Slurm's srun, on a Slurm of one node that runs during the test (slurm.sh).
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

TEST(Srun, RanksFormOneWorld) {
  const auto ran = shell(TESSERA_LAUNCH_TESTS "/slurm.sh sh -c 'srun -n 3 \"$PROBE\" sum; srun -n 1 \"$PROBE\" sum'");
  if (ran.exit_code == 77) GTEST_SKIP() << ran.text;
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  for (int rank = 0; rank < 3; rank++)
    EXPECT_CONTAINS(ran.text, c10::str("sum 6 on rank ", rank, " of 3, ", rank, " of 3 here; Slurm"));
  EXPECT_CONTAINS(ran.text, "sum 1 on rank 0 of 1");
}

// Runs the unmodified scripts of examples/slurm on one node and prints their output.
Shell run_jobs(const std::string& jobs) {
  const std::string before = R"(
    out=$(mktemp -d); trap 'rm -rf $out' EXIT
    job() { sbatch --wait --quiet --nodes=1 --chdir="$out" --output="$out/%j.out" --ntasks-per-node="$@"; }
  )";
  setenv("JOBS", (before + jobs + "; cat $out/*.out; ls $out/*").c_str(), 1);
  return shell("export examples=" TESSERA_LAUNCH_TESTS "/../../examples/slurm PATH=$(dirname '" TESSERA_TORCH_PYTHON
               "'):$PATH; " TESSERA_LAUNCH_TESTS "/slurm.sh sh -c \"$JOBS\"");
}

TEST(Sbatch, RunsAProgramAndTraining) {
  const auto ran = run_jobs(R"(job 2 "$examples/own_program.sbatch" "$PROBE" sum
    job 2 --cpus-per-task=1 "$examples/train.sbatch" --mesh dp=2 --layers 1 --steps 3; ls "$out/outputs/2")");
  if (ran.exit_code == 77) GTEST_SKIP() << ran.text;
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  EXPECT_CONTAINS(ran.text, "sum 3 on rank 1 of 2, 1 of 2 here; Slurm");
  EXPECT_CONTAINS(ran.text, "on 2 ranks, mesh dp=2");  // the plan
  EXPECT_CONTAINS(ran.text, "step:  1  loss");
  EXPECT_CONTAINS(ran.text, "metrics.jsonl\n");
}

TEST(Sbatch, RunsTorchrun) {
  const auto ran = run_jobs(R"(command -v torchrun || { echo "no torchrun"; exit 77; }
    job 1 "$examples/torchrun.sbatch" "$PROBE" sum)");
  if (ran.exit_code == 77) GTEST_SKIP() << ran.text;
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  EXPECT_CONTAINS(ran.text, "sum 3 on rank 1 of 2, 1 of 2 here; RANK and WORLD_SIZE");
}

}  // namespace
}  // namespace tessera::testing
