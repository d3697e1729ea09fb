// One rank of a job does something wrong at a random instant, also before and during init(). `tessera run` then ends
// soon, its headline names that rank, and nothing is left behind. `make soak` runs 300 rounds.
#include "tessera/testing/detail/soak.h"
#include "tests/launch/shell.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <sstream>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

struct FaultRound {
  std::string kind;
  int64_t ranks = 3, faulty_rank = 0, milliseconds = 0;
  std::string backend = "shm";
};
std::string to_text(const FaultRound& round) {
  return c10::str(round.kind, " on rank ", round.faulty_rank, " of ", round.ranks, " after ", round.milliseconds,
                  " ms, ", round.backend);
}

// The kinds of tests/launch/probe.cpp. A rank that merely computes on is found by the time-out.
constexpr const char* kRoundKinds[] = {"kill",        "segv",       "stop",   "exit0",       "exit3",
                                       "abort",       "throw",      "record", "world abort", "wrong size",
                                       "wrong dtype", "wrong call", "compute"};
constexpr double kTimeoutSeconds = 10;  // on a loaded machine, ranks may need seconds to join

double seconds_now() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

std::string headline(const std::string& output) {
  std::istringstream lines(output);
  for (std::string line; std::getline(lines, line);)
    if (line.starts_with("tessera run: ")) return line;
  return "";
}

// The command line of a process that has this argument; "": no process has it.
std::string command_with(const std::string& argument) {
  std::error_code ended;  // processes end while this loop runs
  for (const auto& process : fs::directory_iterator("/proc", ended)) {
    std::ostringstream command;
    command << std::ifstream(process.path() / "cmdline").rdbuf();
    if (command.str().find(argument) != std::string::npos) return process.path().string() + ": " + command.str();
  }
  return "";
}

struct RoundEnd {
  std::string wrong;         // "": nothing
  double seconds_after = 0;  // from the fault to the end, without the time-out
};

RoundEnd run_round(const FaultRound& round, double most_seconds) {
  std::string folder = ::testing::TempDir() + "faultXXXXXX";
  if (!mkdtemp(folder.data())) return {"no temporary folder"};
  const std::string fault_file = folder + "/fault";
  const auto ran = shell(c10::str("export TMPDIR=", folder, " TESSERA_TIMEOUT_S=", kTimeoutSeconds,
                                  " TESSERA_BACKEND=", round.backend, " OMP_NUM_THREADS=1; exec \"$TESSERA\" run -n ",
                                  round.ranks, " -- \"$PROBE\" fault '", round.kind, "' ", round.faulty_rank, " ",
                                  round.milliseconds, " ", fault_file));
  const double ended = seconds_now();
  double fault_ms = 0;
  std::ifstream(fault_file) >> fault_ms;
  std::ostringstream wrong;
  const double after = ended - fault_ms / 1000 - (round.kind == "compute" ? kTimeoutSeconds : 0);
  if (fault_ms == 0) wrong << "  the fault did not happen\n";
  if (after > most_seconds) wrong << "  ended " << after << " s after the fault\n";
  if (ran.exit_code == 0) wrong << "  exited with code 0\n";
  if (!headline(ran.text).starts_with(c10::str("tessera run: rank ", round.faulty_rank, " (pid ")))
    wrong << "  the headline does not name rank " << round.faulty_rank << "\n";
  if (ran.text.find("\nframe #") != std::string::npos || ran.text.find("] frame #") != std::string::npos)
    wrong << "  a backtrace\n";
  for (const auto& entry : fs::directory_iterator(folder))
    if (entry.path() != fault_file) wrong << "  left " << entry.path() << "\n";
  if (const auto left = command_with(fault_file); !left.empty()) wrong << "  a process is left: " << left << "\n";
  fs::remove_all(folder);
  return {wrong.str().empty() ? "" : to_text(round) + "\n" + wrong.str() + ran.text, after};
}

TEST(FaultRounds, EndSoonNameTheCulpritAndLeaveNothing) {
  const auto seeds = soak_seeds(0, 4, 300);
  int failed = 0;
  std::map<std::string, double> longest;  // by kind
  for (uint32_t seed = seeds.first; seed < seeds.end; seed++) {
    std::mt19937 random(seed);
    const auto below = [&](size_t n) { return static_cast<int64_t>(random() % n); };
    FaultRound round;
    round.kind = kRoundKinds[(long_soak() ? seed : 3 * seed + 2) % std::size(kRoundKinds)];
    round.ranks = 3 + below(2);  // a majority exists
    round.faulty_rank = below(static_cast<size_t>(round.ranks));
    round.milliseconds = below(1200);
    round.backend = below(2) ? "shm" : "gloo";
    // A loaded machine may be slow; the soak runs alone.
    const auto end = run_round(round, long_soak() ? 5 : 30);
    failed += !end.wrong.empty();
    EXPECT_EQ(end.wrong, "") << "seed " << seed;
    longest[round.kind] = std::max(longest[round.kind], end.seconds_after);
  }
  const auto count = static_cast<int>(seeds.end - seeds.first);
  std::cout << count - failed << " of " << count << " rounds ended as they should. Seconds after the fault, at most:";
  for (const auto& [kind, seconds] : longest) std::cout << " " << kind << " " << seconds << ",";
  std::cout << "\n";
}

}  // namespace
}  // namespace tessera::testing
