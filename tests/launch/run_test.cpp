// tessera::launch::run() in this process. The ranks run shell scripts.
#include "tessera/base/error.h"
#include "tessera/launch/launcher.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace tessera::launch {
namespace {

namespace fs = std::filesystem;

struct Ran {
  int code = -1;
  std::string out, err;
};

Ran ran(RunOptions options) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  Ran result;
  try {
    result.code = run(options);
  } catch (...) {
    ::testing::internal::GetCapturedStdout();
    ::testing::internal::GetCapturedStderr();
    throw;
  }
  result.out = ::testing::internal::GetCapturedStdout();
  result.err = ::testing::internal::GetCapturedStderr();
  return result;
}

RunOptions script(int64_t ranks, const std::string& text) {
  RunOptions options;
  options.nproc_per_node = ranks;
  options.command = {"sh", "-c", text};
  return options;
}

std::string sorted(const std::string& text) {
  std::multiset<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.insert(line);
  std::string all;
  for (const auto& line : lines) all += line + "\n";
  return all;
}

std::string read(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

class Run : public ::testing::Test {
 protected:
  Run() {
    std::string pattern = ::testing::TempDir() + "runXXXXXX";
    folder_ = mkdtemp(pattern.data());
    setenv("TMPDIR", folder_.c_str(), 1);
  }
  ~Run() override {
    for (const auto& entry : fs::directory_iterator(folder_))
      EXPECT_EQ(entry.path().filename().string().find("tessera-run-"), std::string::npos) << "left: " << entry.path();
    fs::remove_all(folder_);
    unsetenv("TMPDIR");
  }
  fs::path folder_;
};

TEST_F(Run, LinesHaveARankPrefix) {
  const auto result = ran(script(3, "echo I am $RANK of $WORLD_SIZE; echo oh >&2; printf 'no end'"));
  EXPECT_EQ(result.code, 0);
  EXPECT_EQ(sorted(result.out),
            "[rank 0] I am 0 of 3\n[rank 0] no end\n[rank 1] I am 1 of 3\n[rank 1] no end\n[rank 2] I am 2 of 3\n"
            "[rank 2] no end\n");
  EXPECT_EQ(sorted(result.err), "[rank 0] oh\n[rank 1] oh\n[rank 2] oh\n");
}

TEST_F(Run, OneRankHasNoPrefix) { EXPECT_EQ(ran(script(1, "echo hello")).out, "hello\n"); }

TEST_F(Run, LinesOfSeveralRanksDoNotMix) {
  const auto result =
      ran(script(3, "i=0; while [ $i -lt 2000 ]; do echo $RANK-$i-abcdefghijklmnopqrstuvwxyz; i=$((i+1)); done"));
  std::istringstream lines(result.out);
  std::vector<int> next(3);
  int count = 0;
  for (std::string line; std::getline(lines, line); count++) {
    const auto rank = static_cast<size_t>(line.at(6) - '0');
    ASSERT_EQ(line, c10::str("[rank ", rank, "] ", rank, "-", next.at(rank)++, "-abcdefghijklmnopqrstuvwxyz"));
  }
  EXPECT_EQ(count, 6000);
}

TEST_F(Run, RanksShownFiltersOutputNotLogs) {
  auto options = script(3, "echo out $RANK; echo err $RANK >&2");
  options.ranks_shown = {1};
  options.log_dir = folder_ / "logs" / "deep";
  const auto result = ran(options);
  EXPECT_EQ(result.out, "[rank 1] out 1\n");
  EXPECT_EQ(result.err, "[rank 1] err 1\n");
  EXPECT_EQ(read(folder_ / "logs/deep/rank_2.out"), "out 2\n");
  EXPECT_EQ(read(folder_ / "logs/deep/rank_0.err"), "err 0\n");
}

TEST_F(Run, ReportsTheFirstFailureAndItsExitCode) {
  const auto result = ran(script(3, "if [ $RANK = 1 ]; then echo the reason >&2; exit 7; fi; exec sleep 100"));
  EXPECT_EQ(result.code, 7);
  EXPECT_CONTAINS(result.err, "tessera run: rank 1 (pid ");
  EXPECT_CONTAINS(result.err, ") exited with code 7 on ");
  EXPECT_CONTAINS(result.err, "last lines of standard error:\n    the reason\n");
}

TEST_F(Run, ExitCodeOfAKilledRankIs128PlusSignal) {
  const auto result = ran(script(2, "[ $RANK = 0 ] && kill -9 $$; exec sleep 100"));
  EXPECT_EQ(result.code, 137);
  EXPECT_CONTAINS(result.err, "was killed by signal 9 (Killed)");
}

TEST_F(Run, ARankIsKilledAfterTheGracePeriod) {
  auto options = script(2, "[ $RANK = 0 ] && exit 3; trap '' TERM; while :; do sleep 0.01; done");
  options.grace_period = std::chrono::milliseconds(50);
  EXPECT_EQ(ran(options).code, 3);
}

TEST_F(Run, AStoppedRankEndsToo) {
  auto options = script(2, "[ $RANK = 0 ] || kill -STOP $$; exit 3");
  options.grace_period = std::chrono::hours(1);  // SIGKILL must not be needed
  EXPECT_EQ(ran(options).code, 3);
}

TEST_F(Run, ChildrenOfRanksAreKilled) {
  const auto result = ran(script(2, "sleep 100 & echo $!"));
  EXPECT_EQ(result.code, 0);
  std::istringstream words(result.out);
  int found = 0;
  for (std::string bracket, rank, pid; words >> bracket >> rank >> pid; found++) {
    // Waits until the process is gone, or a zombie that its new parent has not reaped yet.
    for (std::string state = "?"; !state.empty() && state.find(") Z ") == std::string::npos;)
      state = read("/proc/" + pid + "/stat");
  }
  EXPECT_EQ(found, 2);
}

TEST_F(Run, TheFirstErrorFileIsTheRootCause) {
  // Rank 1 fails first but exits late. Rank 0 fails because of it and exits first.
  const std::string write = R"(printf '{"message": {"message": "by %s"}}' $RANK > $TORCHELASTIC_ERROR_FILE; )";
  const auto result = ran(script(2, "cd " + folder_.string() + "; if [ $RANK = 1 ]; then " + write +
                                        "touch go; trap 'exit 5' TERM; while :; do sleep 0.01; done; fi; "
                                        "until [ -e go ]; do sleep 0.01; done; sleep 0.02; " +
                                        write + "exit 4"));
  EXPECT_EQ(result.code, 5);
  EXPECT_CONTAINS(result.err, "rank 1 (pid ");
  EXPECT_CONTAINS(result.err, "error: by 1\n");
}

TEST_F(Run, RestartsAllRanks) {
  auto options = script(2, "echo start $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 2 ] || exit 4");
  options.max_restarts = 3;
  options.log_dir = folder_;
  const auto result = ran(options);
  EXPECT_EQ(result.code, 0);
  EXPECT_CONTAINS(result.err, "exited with code 4");
  EXPECT_CONTAINS(result.err, "restarting all ranks (restart 2 of 3)");
  EXPECT_CONTAINS(read(folder_ / "rank_0.out"), "start 2\n");
}

TEST_F(Run, ReportsThatNoRestartsAreLeft) {
  auto options = script(2, "exit 4");
  options.max_restarts = 2;
  const auto result = ran(options);
  EXPECT_EQ(result.code, 4);
  EXPECT_CONTAINS(result.err, "restarting all ranks (restart 2 of 2)");
  EXPECT_CONTAINS(result.err, "no restarts left (--max-restarts 2)");
}

TEST_F(Run, RanksInheritOnlyTheStandardDescriptors) {
  const int ours = dup(STDERR_FILENO);  // would be inherited without close-on-exec
  auto options = script(1, "");
  options.command = {"ls", "/proc/self/fd"};
  EXPECT_EQ(ran(options).out, "0\n1\n2\n3\n");  // the last is the folder ls reads
  close(ours);
}

TEST_F(Run, RankZeroReadsStandardInput) {
  const int before = dup(STDIN_FILENO);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  ASSERT_EQ(write(ends[1], "given\n", 6), 6);
  dup2(ends[0], STDIN_FILENO);
  for (const int end : ends) close(end);
  EXPECT_EQ(sorted(ran(script(2, "echo $RANK; cat")).out), "[rank 0] 0\n[rank 0] given\n[rank 1] 1\n");
  dup2(before, STDIN_FILENO);
  close(before);
}

TEST_F(Run, PinnedRanksHaveTheirOwnCores) {
  auto options = script(static_cast<int64_t>(std::thread::hardware_concurrency()) + 1,  // one core each
                        "[ $RANK != 0 ] || grep Cpus_allowed_list /proc/self/status");
  options.pin = true;
  const auto result = ran(options);
  EXPECT_CONTAINS(result.out, "[rank 0] Cpus_allowed_list:");
  EXPECT_EQ(result.out.find_first_of(",-", result.out.find(':')), std::string::npos) << result.out;
}

TEST_F(Run, BadOptionsAreUsageErrors) {
  const auto with = [](auto change) {
    auto options = script(2, "exit 0");
    change(options);
    return options;
  };
  EXPECT_ERROR(UsageError, ran(script(0, "")), "-n 0: the number of ranks must be at least 1");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.command = {}; })), "no program to run",
               "tessera run -n 4 -- ./app");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.command = {"./no-such"}; })), "program './no-such' not found");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.command = {"no-such"}; })), "program 'no-such' not found in PATH");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.nnodes = 2; })), "--nnodes 2 needs --rdzv host:port");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.node_rank = 1; })), "--node-rank 1 with --nnodes 1", "0 to 0");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.rdzv_endpoint = "head"; })), "--rdzv 'head': write host:port");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.rdzv_endpoint = "no.such.host.invalid:80"; })),
               "no.such.host.invalid");
  EXPECT_ERROR(UsageError, ran(with([](auto& o) { o.max_restarts = -1; })), "--max-restarts -1");

  const fs::path plain = folder_ / "plain", broken = folder_ / "broken";
  std::ofstream(plain) << "echo";
  std::ofstream(broken) << "no program";
  fs::permissions(broken, fs::perms::owner_all);
  EXPECT_ERROR(UsageError, ran(with([&](auto& o) { o.command = {plain.string()}; })), "is not executable", "chmod +x");
  EXPECT_ERROR(UsageError, ran(with([&](auto& o) { o.command = {broken.string()}; })), "cannot execute",
               "Exec format error");
  EXPECT_ERROR(UsageError, ran(with([&](auto& o) { o.command = {folder_.string() + "/"}; })), "not found");
  EXPECT_ERROR(UsageError, ran(with([&](auto& o) { o.log_dir = (plain / "x").string(); })), "cannot create");
}

TEST_F(Run, ATakenPortIsReported) {
  auto options = script(2, "echo $MASTER_PORT");
  const auto port = ran(options).out;
  // The rank of one job starts a second job on the same port.
  options.nproc_per_node = 1;
  const std::string free_port = std::to_string(std::atoi(port.substr(port.find(']') + 2).c_str()));
  options.rdzv_endpoint = "127.0.0.1:" + free_port;
  options.command[2] = "exec \"$TESSERA\" run -n 1 --rdzv 127.0.0.1:" + free_port + " -- true";
  setenv("TESSERA", TESSERA_PROGRAM, 1);
  const auto result = ran(options);
  EXPECT_EQ(result.code, 1);
  EXPECT_CONTAINS(result.err, "cannot listen on 127.0.0.1:" + free_port + ": Address already in use");
  EXPECT_CONTAINS(result.err, "choose another one");
}

TEST(Address, ParsesHostAndPort) {
  EXPECT_EQ(parse_address("head:29400"), (Address{"head", 29400}));
  EXPECT_EQ(parse_address("[::1]:80"), (Address{"::1", 80}));
  for (const char* bad : {"", "head", "head:", ":80", "head:x", "head:0", "head:65536", "head:80x"})
    EXPECT_ERROR(UsageError, parse_address(bad), "write host:port");
}

}  // namespace
}  // namespace tessera::launch
