// `tessera` as a process: two runs at once, a reused output folder, a full disk, and exit codes.
// As few processes as possible: each takes a second to start.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

using testing::count;
using testing::shell;

// run NAME ARGUMENTS: trains a tiny model and prints its exit code and the last line of its output.
const std::string kTrustSetup =
    "cd $(mktemp -d); trap 'umount disk 2>/dev/null; rm -rf \"$PWD\"' EXIT; export OMP_NUM_THREADS=1;"
    "tiny='--layers 1 --heads 2 --dim 16 --batch 8 --warmup 1 --eval-samples 8 --sample-tokens 0';"
    "run() { name=$1; shift; \"$TESSERA\" train $tiny \"$@\" > log.$name 2>&1; "
    "echo $name: $? $(tail -n 1 log.$name); };";

TEST(Program, RunsThatStartTogetherHaveDifferentFolders) {
  const auto ran = shell(kTrustSetup +
                         "run a --steps 3 & run b --steps 3 & wait; ls outputs | wc -l; cat outputs/*/metrics.jsonl | "
                         "grep -c grad_norm; cat outputs/*/metrics.jsonl | grep -c '\"step\":3,\"loss\"'");
  EXPECT_CONTAINS(ran.text, "\n2\n6\n2\n");  // two folders with three steps each
}

TEST(Program, AReusedOutputFolderNeedsResumeOrOverwrite) {
  const auto ran = shell(kTrustSetup +
                         "run c --steps 4 --checkpoint-every 2 --output out; run d --steps 1 --output out;"
                         "run e --steps 6 --output out --resume out/checkpoints/step-2 -n 2;"
                         "grep -o '\"step\":[0-9]*,\"loss\"' out/metrics.jsonl | tr -d '\\n'; echo;"
                         "run f --steps 1 --output out --overwrite; ls out; wc -l < out/metrics.jsonl");
  EXPECT_CONTAINS(ran.text, "d: 2 tessera train: the output folder 'out' has config.toml of an earlier run; choose");
  EXPECT_CONTAINS(ran.text, "e: 0 ");
  std::string once;
  for (int step = 1; step <= 6; step++) once += c10::str("\"step\":", step, ",\"loss\"");
  EXPECT_CONTAINS(ran.text, "\n" + once + "\n");
  EXPECT_CONTAINS(ran.text,
                  "\nconfig.toml\nmetrics.jsonl\nreport.html\nrun.json\ntb\n2\n");  // two lines; no old checkpoints
}

TEST(Program, AFullDiskIsAFailureAndNotWrongInput) {
  const auto output = shell("\"$TESSERA\" plan > /dev/full; echo code $?");
  EXPECT_CONTAINS(output.text, "tessera: cannot write to standard output: No space left on device\ncode 1\n");

  const auto ran = shell(kTrustSetup +
                         "mkdir disk; mount -t tmpfs -o size=64k tmpfs disk 2>/dev/null || { echo no mount; exit; };"
                         "run full --steps 100000 --output disk/x; ls disk/x; tail -c 1 disk/x/metrics.jsonl | od -c;"
                         "run folder --steps 1 --output disk/y");
  if (ran.text.find("no mount") != std::string::npos) GTEST_SKIP() << "a small disk needs root, for mount";
  EXPECT_CONTAINS(ran.text, "full: 1 tessera train: cannot write 'disk/x/");
  EXPECT_EQ(count(ran.text, ": No space left on device"), 2) << ran.text;
  EXPECT_CONTAINS(ran.text, "0000000  \\n\n");  // no part of a line
  EXPECT_CONTAINS(ran.text, "folder: 1 tessera train: ");
}

// Checkpoints fill a small disk. The save that does not fit fails; the earlier ones are complete, and no part is left.
TEST(Program, ACheckpointThatDoesNotFitLeavesTheEarlierOnes) {
  for (const std::string how : {"", "--checkpoint-async"}) {
    const auto ran = shell(kTrustSetup +
                           "mkdir disk; mount -t tmpfs -o size=400k tmpfs disk 2>/dev/null || { echo no mount; exit; };"
                           "run full --steps 100 --output out --checkpoint-every 1 --checkpoint.keep 0 "
                           "--checkpoint-folder disk " +
                           how + "; ls disk; for c in disk/step-*; do \"$TESSERA\" ckpt verify $c; done");
    if (ran.text.find("no mount") != std::string::npos) GTEST_SKIP() << "a small disk needs root, for mount";
    EXPECT_CONTAINS(ran.text, "full: 1 tessera train: ");
    EXPECT_EQ(count(ran.text, "No space left on device"), 1) << ran.text;
    EXPECT_EQ(count(ran.text, ".partial"), count(ran.text, "cannot write 'disk/")) << ran.text;  // only in the message
    EXPECT_CONTAINS(ran.text, "disk/step-1: ok, ");
    EXPECT_EQ(count(ran.text, ": ok, "), count(ran.text, "\nstep-")) << ran.text;
  }
}

}  // namespace
}  // namespace tessera::cli
