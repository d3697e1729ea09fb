// `tessera run` as a process: command line, signals, ranks that use the library.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

TEST(TesseraRun, RanksFormOneWorldTwice) {
  const auto ran = shell("\"$TESSERA\" run -n 3 -- \"$PROBE\" twice");
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  for (int rank = 0; rank < 3; rank++)
    EXPECT_EQ(count(ran.text, c10::str("[rank ", rank, "] sum 6 on rank ", rank, " of 3, ", rank, " of 3 here")), 2)
        << ran.text;
}

TEST(TesseraRun, AnUncaughtExceptionIsReported) {
  const auto ran = shell("\"$TESSERA\" run -n 2 -- \"$PROBE\" throw 1");
  EXPECT_EQ(ran.exit_code, 134) << ran.text;  // abort
  EXPECT_CONTAINS(ran.text, "tessera run: rank 1 (pid ");
  EXPECT_CONTAINS(ran.text, "error: std::runtime_error: it \"broke\"\non rank 1\n");
}

TEST(TesseraRun, ARecordedExceptionIsReported) {
  const auto ran = shell("\"$TESSERA\" run -n 2 --max-restarts 1 -- \"$PROBE\" catch 0");
  EXPECT_EQ(ran.exit_code, 3) << ran.text;
  EXPECT_EQ(count(ran.text, "error: std::runtime_error: it \"broke\"\non rank 0\n"), 2) << ran.text;
  EXPECT_EQ(count(ran.text, "sum 3 on rank 1 of 2"), 2) << ran.text;  // the restarted ranks use the same store
}

// Rank 1 records its error and calls exit(3), which takes longer than the abort of the ranks that it breaks.
TEST(TesseraRun, TheExitCodeIsThatOfTheRankThatFailedFirst) {
  const auto ran = shell("\"$TESSERA\" run -n 3 -- \"$PROBE\" exit 1");
  EXPECT_EQ(ran.exit_code, 3) << ran.text;
  EXPECT_CONTAINS(ran.text, "tessera run: rank 1 (pid ");
  EXPECT_CONTAINS(ran.text, ") exited with code 3 on ");
  EXPECT_EQ(ran.text.find("frame #"), std::string::npos) << "a backtrace: " << ran.text;
}

// Exit code 2 is for wrong input, 1 for what the machine cannot do now.
TEST(TesseraRun, AFailureOfTheMachineIsNotWrongInput) {
  const auto files = shell("ulimit -n 64; \"$TESSERA\" run -n 60 -- sleep 100");
  EXPECT_EQ(files.exit_code, 1) << files.text;
  EXPECT_CONTAINS(files.text, "cannot create a pipe for a rank (`ulimit -n` shows the limit of open files): Too many");

  const auto disk = shell(
      "disk=$(mktemp -d); export disk; unshare -m sh -c '"
      "mount -t tmpfs -o nr_inodes=1 tmpfs $disk || exit;"
      "TMPDIR=$disk \"$TESSERA\" run -n 1 -- true; echo code $?;"
      "\"$TESSERA\" run --log-dir $disk/x -n 1 -- true; echo code $?'; rmdir $disk");
  if (disk.text.find("code") == std::string::npos) GTEST_SKIP() << "a small disk needs root, for mount: " << disk.text;
  EXPECT_CONTAINS(disk.text, "cannot create a folder in TMPDIR, ");
  EXPECT_CONTAINS(disk.text, "cannot create the folder --log-dir ");
  EXPECT_EQ(count(disk.text, ": No space left on device\ncode 1\n"), 2) << disk.text;
}

// The launcher knows that a rank will not join, and tells the others.
TEST(TesseraRun, ARankThatExitsBeforeInitIsTheCause) {
  const auto ran = shell(
      "export TESSERA_TIMEOUT_S=50;"
      "\"$TESSERA\" run -n 3 -- sh -c '[ $RANK = 1 ] && exit 0; exec \"$PROBE\" sum'");
  EXPECT_EQ(ran.exit_code, 134) << ran.text;  // not 124, the end of the shell's patience
  EXPECT_CONTAINS(ran.text, "tessera run: rank 1 (pid ");
  EXPECT_CONTAINS(ran.text, ") exited with code 0; because of it, rank ");
  EXPECT_CONTAINS(ran.text, "waits for all 3 ranks to join: rank 1 (pid ");
}

TEST(TesseraRun, ARankThatIsStoppedBeforeInitIsTheCause) {
  const auto ran = shell(
      "export TESSERA_TIMEOUT_S=50;"
      "\"$TESSERA\" run -n 2 -- sh -c '[ $RANK = 0 ] && kill -STOP $$; exec \"$PROBE\" sum'");
  EXPECT_EQ(ran.exit_code, 134) << ran.text;
  EXPECT_CONTAINS(ran.text, "tessera run: rank 0 (pid ");
  EXPECT_CONTAINS(ran.text, ") is stopped by a signal (SIGSTOP or ^Z); because of it, rank 1 (pid ");
}

// Ranks append their pid to the file `up`. `await N` waits for N lines; `gone` waits until these processes have ended.
const std::string kStart =
    "cd $(mktemp -d); touch up; trap 'rm -rf \"$PWD\"' EXIT;"
    "await() { until [ $(wc -l < up) -ge $1 ]; do sleep 0.01; done; };"
    "gone() { for p in $(cat up); do while kill -0 $p 2>/dev/null && ! grep -q ' Z ' /proc/$p/stat; do sleep 0.01; "
    "done; done; };";

TEST(TesseraRun, SignalsAreForwarded) {
  const auto ran =
      shell(kStart +
            "\"$TESSERA\" run -n 2 -- sh -c 'trap \"echo got USR1\" USR1; trap \"echo got TERM; exit 0\" TERM;"
            "echo $$ >> up; while :; do sleep 0.01; done' > out & "
            "await 2; kill -USR1 $!; until [ $(grep -c USR1 out) = 2 ]; do sleep 0.01; done;"
            "kill -TERM $!; wait $!; echo code $?; gone; cat out");
  EXPECT_CONTAINS(ran.text, "code 143\n");
  EXPECT_CONTAINS(ran.text, "tessera run: stopped by signal 15 (Terminated) on ");
  EXPECT_EQ(count(ran.text, "got TERM"), 2) << ran.text;
}

// ^Z reaches the launcher only: each rank has a process group of its own.
TEST(TesseraRun, CtrlZStopsAndContinuesAllRanks) {
  const auto ran =
      shell(kStart +
            "state() { for p in \"$@\"; do sed 's/.*) \\(.\\).*/\\1/' /proc/$p/stat; done | tr -d '\\n'; };"
            "until_state() { w=$1; shift; until [ $(state \"$@\") = $w ]; do sleep 0.01; done; };"
            "env --default-signal=TSTP \"$TESSERA\" run -n 2 -- sh -c 'echo $$ >> up;"
            "exec sleep 1000' & launcher=$!; await 2; ranks=$(cat up);"
            "kill -TSTP $launcher; until_state TTT $launcher $ranks; echo all stopped;"
            "kill -CONT $launcher; until_state SSS $launcher $ranks; echo all continued;"
            "kill $launcher; wait $launcher; echo code $?; gone");
  EXPECT_CONTAINS(ran.text, "all stopped\nall continued\n");
  EXPECT_CONTAINS(ran.text, "code 143\n");
}

TEST(TesseraRun, NohupIgnoresSighup) {
  const auto ran = shell(kStart +
                         "nohup \"$TESSERA\" run -n 2 -- sh -c 'echo $$ >> up; until [ -e go ]; do sleep 0.01; done; "
                         "echo done $RANK' & await 2; kill -HUP $!; touch go; wait $!; echo code $?");
  EXPECT_CONTAINS(ran.text, "[rank 1] done 1");
  EXPECT_CONTAINS(ran.text, "code 0\n");
}

TEST(TesseraRun, TheSecondSignalKills) {
  const auto ran =
      shell(kStart +
            "\"$TESSERA\" run -n 2 --grace 1000 -- sh -c 'trap \"echo $$ >> up\" TERM; echo $$ >> up;"
            "while :; do sleep 0.01; done' & await 2; kill $!; await 4; kill $!; wait $!; echo code $?; gone");
  EXPECT_CONTAINS(ran.text, "code 143\n");
}

TEST(TesseraRun, ASignalAfterAFailureKeepsTheFailure) {
  const auto ran = shell(kStart +
                         "\"$TESSERA\" run -n 2 --grace 1000 --max-restarts 1 -- sh -c 'trap \"echo $$ >> up\" TERM;"
                         "if [ $RANK = 1 ]; then until [ -e ready ]; do sleep 0.01; done; exit 7; fi;"
                         "touch ready; while :; do sleep 0.01; done' & await 1; kill $!; wait $!; echo code $?");
  EXPECT_CONTAINS(ran.text, "exited with code 7 on ");
  EXPECT_CONTAINS(ran.text, "code 7\n");
}

TEST(TesseraRun, NoProcessIsLeftAfterSigkill) {
  const auto ran =
      shell(kStart +
            "export TMPDIR=$PWD; \"$TESSERA\" run -n 2 -- sh -c 'sleep 1000 & echo $! >> up; echo $$ >> up;"
            "wait' & await 4; kill -9 $!; gone; while [ -e tessera-run-* ]; do sleep 0.01; done; echo all gone");
  EXPECT_CONTAINS(ran.text, "all gone\n");
}

TEST(TesseraRun, AClosedStandardOutputEndsTheJob) {
  const auto ran = shell(kStart +
                         "(\"$TESSERA\" run -n 2 -- sh -c 'echo $$ >> up; while :; do echo y; done'; echo code $? >&2)"
                         " | head -n 1; gone");
  EXPECT_CONTAINS(ran.text, "code 141\n");
}

TEST(TesseraRun, CommandLineErrorsAndOptions) {
  const auto says = [](const std::string& arguments, int code, const std::string& part) {
    const auto ran = shell("\"$TESSERA\" run " + arguments);
    EXPECT_EQ(ran.exit_code, code) << ran.text;
    EXPECT_CONTAINS(ran.text, part);
  };
  says("-n 2 ./app --lr 3", 2, "unknown option './app'; write -- before the program");
  says("-- true", 2, "-n");
  says("-n 2 -- no-such-program", 2, "tessera: program 'no-such-program' not found in PATH");
  says("-n 3 --ranks-shown 0,2 -- sh -c 'echo $RANK $OMP_NUM_THREADS -- \"$@\"' sh -n 5 -- x", 0, "[rank 2] 2 ");
  says("-n 1 --threads-per-rank 7 -- sh -c 'echo $OMP_NUM_THREADS -- \"$@\"' sh -n 5 -- x", 0, "7 -- -n 5 -- x\n");
}

// The bench program starts itself again for each rank.
TEST(TesseraBench, RunsOnProcesses) {
  const auto ran = shell("\"$TESSERA\" bench noop");
  if (ran.text.find("cannot start the program") != std::string::npos) GTEST_SKIP() << ran.text;
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  EXPECT_CONTAINS(ran.text, "empty/1/-/wall");
  EXPECT_CONTAINS(ran.text, "empty/2/-/wall");
}

}  // namespace
}  // namespace tessera::testing
