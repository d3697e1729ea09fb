#pragma once
#include "tessera/launch/detail/cleanup_process.h"
#include "tessera/launch/detail/output.h"
#include "tessera/launch/detail/rank_process.h"

#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>

namespace tessera::launch {

// How the process of a rank ended.
struct RankExit {
  int64_t rank = -1;
  pid_t pid = -1;
  int exit_code = 0;  // 128 + signal if a signal killed it
  int signal = 0;     // 0: it exited by itself
  bool ok() const { return exit_code == 0; }
};
std::ostream& operator<<(std::ostream& out, const RankExit& exit);  // "rank 2 (pid 17) exited with code 3"

// What happens to the output of the ranks.
struct RankOutput {
  OutputSink *out = nullptr, *err = nullptr;
  bool prefix = true, colour_out = false, colour_err = false;
  std::optional<std::set<int64_t>> ranks_shown;  // nullopt: all
  std::string log_dir;                           // one file per rank and stream; empty: none
  bool append = false;                           // keeps the log files of earlier starts
};

// The worker processes of this host, from start to exit. The destructor kills those that still run.
class LocalRanks {
 public:
  using Clock = std::chrono::steady_clock;

  LocalRanks(const Command& command, const std::vector<RankPlan>& plans, const RankOutput& output,
             const Signals& signals, CleanupProcess& cleanup);
  ~LocalRanks();
  LocalRanks(const LocalRanks&) = delete;

  // Waits up to `timeout` for output, the exit of a rank or a signal, and handles output and exits.
  // Returns the signals that this process received.
  std::vector<int> poll_events(std::chrono::milliseconds timeout);

  int64_t running() const;
  bool stopping() const { return stopping_; }
  void send_signal(int signal);  // to the process group of every running rank
  // Sends `signal` to all running ranks. Sends SIGKILL to those that still run after `grace_period`.
  // SIGTERM: the root cause of a failure is about to exit with its own code, so it gets the signal later.
  void stop(int signal, std::chrono::milliseconds grace_period);
  const std::optional<RankExit>& first_failure() const { return first_failure_; }
  // By rank: "rank 1 (pid 17) exited with code 0", or "... is stopped by a signal" if it has been for
  // kStoppedBeforeLost. Other ranks may wait for such a rank to join.
  std::map<int64_t, std::string> absent() const;
  // The rank that wrote its error file first, or the culprit that this file names, if that rank has an error file too.
  // If no rank has one, the rank of first_failure(). Requires: first_failure() has a value. If the rank still runs, its
  // exit code and signal are those of first_failure().
  RankExit root_cause() const;
  // If the error file of the root cause says that a rank without an error file is the culprit: what that rank did, as
  // in "rank 2 (pid 17) exited with code 0". Else "".
  std::string culprit() const;
  std::string error_message(int64_t rank) const;             // from the error file; empty: none
  std::vector<std::string> stderr_tail(int64_t rank) const;  // the last lines of its standard error
  std::vector<std::string> incomplete_logs() const;          // log files that could not be written completely

 private:
  struct LocalRank;
  void reap();
  static void drain(int& fd, LineStream& stream);
  static void drain_all(int& fd, LineStream& stream);
  void read_stops(LocalRank& rank);
  std::chrono::milliseconds time_to_next_deadline(std::chrono::milliseconds at_most) const;
  void send_due_signals();
  bool is_absent(const LocalRank& rank) const;
  std::string what_it_did(int64_t rank) const;
  const LocalRank* find_local(int64_t rank) const;  // null: it runs on another host
  const LocalRank& find(int64_t rank) const;

  const Signals& signals_;
  CleanupProcess& cleanup_;
  std::vector<std::unique_ptr<LocalRank>> ranks_;
  bool stopping_ = false;
  Clock::time_point now_{};  // of the last poll. A deadline counts as passed by this time alone, so none is missed
  std::optional<Clock::time_point> kill_deadline_;
  std::optional<Clock::time_point> late_signal_deadline_;  // then the root cause gets SIGTERM too
  std::optional<RankExit> first_failure_;
};

}  // namespace tessera::launch
