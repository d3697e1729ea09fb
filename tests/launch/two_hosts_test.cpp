// One launcher on each of two hosts. The hosts are network namespaces (two_hosts.sh).
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

namespace tessera::testing {
namespace {

Shell two_hosts(const std::string& a, const std::string& b) {
  setenv("SCRIPT_A", a.c_str(), 1);
  setenv("SCRIPT_B", b.c_str(), 1);
  return shell("export TESSERA_TIMEOUT_S=50; exec " TESSERA_LAUNCH_TESTS "/two_hosts.sh \"$SCRIPT_A\" \"$SCRIPT_B\"");
}

std::string launcher(int node, const std::string& rest, int nodes = 2) {
  return c10::str("export TESSERA_GLOO_HOST=$ME; \"$TESSERA\" run --nnodes ", nodes, " --node-rank ", node,
                  " --rdzv 10.77.0.1:29400 ", rest);
}
std::string run(int node, const std::string& rest, int nodes = 2) {
  return launcher(node, rest, nodes) + "; echo code $?";
}

class TwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto tried = two_hosts("true", "true");
    if (tried.exit_code == 77) GTEST_SKIP() << tried.text;
  }
};

TEST_F(TwoHosts, RanksAreNumberedByNodeRank) {
  const auto ran = two_hosts(run(0, "-n 1 -- \"$PROBE\" sum"), run(1, "-n 2 -- \"$PROBE\" sum"));
  EXPECT_CONTAINS(ran.text, "a: [rank 0] sum 6 on rank 0 of 3, 0 of 1 here");
  EXPECT_CONTAINS(ran.text, "b: [rank 1] sum 6 on rank 1 of 3, 0 of 2 here");
  EXPECT_CONTAINS(ran.text, "b: [rank 2] sum 6 on rank 2 of 3, 1 of 2 here");
  EXPECT_CONTAINS(ran.text, "a: code 0\n");
  EXPECT_CONTAINS(ran.text, "b: code 0\n");
  EXPECT_EQ(count(ran.text, "a: tessera run: warning: no TESSERA_JOB_SECRET"), 1) << ran.text;
  EXPECT_EQ(count(ran.text, "no TESSERA_JOB_SECRET"), 1) << ran.text;
}

TEST_F(TwoHosts, Selftest) {
  const std::string app =
      "-n 2 -- \"$TESSERA\" selftest --backends gloo --plant wrong:3,slow:0-2 -o /tmp/tessera-two-hosts-$$.txt";
  const auto ran = two_hosts(run(0, app), run(1, app) + "; rm -f /tmp/tessera-two-hosts-*.txt");
  EXPECT_CONTAINS(ran.text, "4 ranks over gloo");
  EXPECT_CONTAINS(ran.text, "rank 3 on host-b sends wrong values: 4 of 4");
  EXPECT_CONTAINS(ran.text, "the link between rank 0 on host-a and rank 2 on host-b is slow");
  EXPECT_EQ(count(ran.text, "is slow"), 1) << ran.text;
  EXPECT_CONTAINS(ran.text, "fully_shard");
}

// Each host writes its shards. The second run resumes from what both have written.
TEST_F(TwoHosts, TrainAndResumeFromAsynchronousCheckpoints) {
  const std::string folder = ::testing::TempDir() + c10::str("two-hosts-checkpoints-", getpid());
  const auto app = [&](const char* more) {
    return "-n 1 -- \"$TESSERA\" train --mesh fsdp=2 --layers 1 --heads 2 --dim 16 --batch 8 --eval.samples 8 "
           "--sample-tokens 0 --checkpoint-every 2 --checkpoint-async --output " +
           folder + more;
  };
  const auto first = two_hosts(run(0, app(" --steps 4")), run(1, app(" --steps 4")));
  EXPECT_CONTAINS(first.text, "a: code 0\n");
  EXPECT_CONTAINS(first.text, "b: code 0\n");
  const auto second = two_hosts(run(0, app(" --steps 6 --resume auto")), run(1, app(" --steps 6 --resume auto")));
  EXPECT_CONTAINS(second.text, "resumed from " + folder + "/checkpoints/step-4 at step 4");
  EXPECT_CONTAINS(second.text, "b: code 0\n");
  const auto verified = shell("\"$TESSERA\" ckpt verify " + folder + "/checkpoints/step-6; rm -r " + folder);
  EXPECT_CONTAINS(verified.text, "step-6: ok, ");
}

// Host a waits for the other one until b, which was refused, ends it.
TEST_F(TwoHosts, AHostWithAnotherSecretIsRefused) {
  const std::string secret = "export TESSERA_JOB_SECRET=0123456789abcdef";
  const std::string refused = ::testing::TempDir() + c10::str("two-hosts-refused-", getpid());
  const auto ran = two_hosts(secret + "; " + launcher(0, "-n 1 -- true") + " & until [ -e " + refused +
                                 " ]; do sleep 0.01; done; kill $!; wait $!; echo code $?",
                             secret + "0; " + run(1, "-n 1 -- true") + "; touch " + refused);
  std::filesystem::remove(refused);
  EXPECT_CONTAINS(ran.text, "b: tessera: the store at 10.77.0.1:29400 refuses this process, which has another secret");
  EXPECT_CONTAINS(ran.text, "a: code 143\n");
  EXPECT_EQ(count(ran.text, "no TESSERA_JOB_SECRET"), 0) << ran.text;
}

TEST_F(TwoHosts, BothHostsReportAFailure) {
  const std::string app =
      " -n 1 --max-restarts 1 -- sh -c 'echo start $TORCHELASTIC_RESTART_COUNT;"
      "if [ $RANK = 1 ]; then exit $((5 + TORCHELASTIC_RESTART_COUNT)); fi; exec sleep 1000'";
  const auto ran = two_hosts(run(0, app), run(1, app));
  EXPECT_CONTAINS(ran.text, "a: [rank 0] start 1");
  EXPECT_CONTAINS(ran.text, "b: [rank 1] start 1");
  for (const std::string host : {"a", "b"}) {
    EXPECT_CONTAINS(ran.text, host + ": tessera run: rank 1 (pid ");
    EXPECT_CONTAINS(ran.text, "exited with code 6 on host-b");
    EXPECT_CONTAINS(ran.text, host + ": tessera run: no restarts left (--max-restarts 1)");
    EXPECT_CONTAINS(ran.text, host + ": code 6\n");
  }
}

TEST_F(TwoHosts, LosingTheStoreIsReported) {
  const auto ran =
      two_hosts("\"$TESSERA\" run -n 1 --nnodes 2 --rdzv 10.77.0.1:29400 -- sh -c 'kill -9 $PPID' ; echo code $?",
                run(1, "-n 1 -- sleep 1000"));
  EXPECT_CONTAINS(ran.text, "a: code 137");
  EXPECT_CONTAINS(ran.text, "lost the connection to the store at 10.77.0.1:29400, which the launcher of node 0 serves");
  EXPECT_CONTAINS(ran.text, "b: code 1\n");
}

TEST_F(TwoHosts, DifferentNnodesIsAnError) {
  const auto ran = two_hosts(run(0, "-n 1 -- true", 3), run(1, "-n 1 -- true"));
  EXPECT_CONTAINS(ran.text, "b: tessera: ");
  EXPECT_CONTAINS(ran.text, "--nnodes 2");
  EXPECT_CONTAINS(ran.text, "--nnodes 3");
  EXPECT_CONTAINS(ran.text, "use the same value on all hosts");
}

}  // namespace
}  // namespace tessera::testing
