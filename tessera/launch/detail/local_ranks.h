#pragma once
#include "tessera/launch/detail/cleanup_process.h"
#include "tessera/launch/detail/output.h"
#include "tessera/launch/detail/rank_process.h"

#include <chrono>
#include <memory>
#include <optional>
#include <set>

namespace tessera::launch {

// How a rank ended.
struct Ended {
  int64_t rank = -1;
  pid_t pid = -1;
  int exit_code = 0;  // 128 + signal if a signal ended it
  int signal = 0;     // 0: it exited by itself
  bool ok() const { return exit_code == 0; }
};
std::ostream& operator<<(std::ostream& out, const Ended& ended);  // "rank 2 (pid 17) exited with code 3"

struct CrewOutput {
  Sink *out = nullptr, *err = nullptr;
  bool prefix = true, colour_out = false, colour_err = false;
  std::optional<std::set<int64_t>> shown;  // ranks; none: all
  std::string log_folder;                  // one file a rank and stream; empty: none
  bool append = false;                     // to the files of the ranks' first start
};

// The ranks of this host, from their start to their end. Nothing of them is left when it is destroyed.
class Crew {
 public:
  using Clock = std::chrono::steady_clock;

  Crew(const Program& program, const std::vector<RankPlan>& plans, const CrewOutput& output, const Signals& signals,
       Guard& guard);
  ~Crew();
  Crew(const Crew&) = delete;

  // Waits for output, the end of a rank, or a signal, at most so long; gives the signals.
  std::vector<int> turn(std::chrono::milliseconds at_most);

  int64_t running() const;
  bool stopping() const { return stopping_; }
  void pass_on(int signal);                                // to every rank that runs, and what it started
  void stop(int signal, std::chrono::milliseconds grace);  // the same; who still runs after `grace` is killed
  const std::optional<Ended>& first_failure() const { return first_failure_; }
  // The rank whose error came first, by the files ranks leave; that of first_failure() if they do not say otherwise.
  // Requires: there is a first_failure(). While others still run, how the cause will end may not be known: it then
  // counts as ended like the first.
  Ended cause() const;
  std::string last_words(int64_t rank) const;               // what its error file says; empty: nothing
  std::vector<std::string> last_lines(int64_t rank) const;  // of its standard error
  std::vector<std::string> broken_logs() const;             // log files that could not take all they were given

 private:
  struct Member;
  void reap();
  static void drain(int& fd, LineStream& stream);
  static void drain_all(int& fd, LineStream& stream);
  const Member& member(int64_t rank) const;

  const Signals& signals_;
  Guard& guard_;
  std::vector<std::unique_ptr<Member>> members_;
  bool stopping_ = false;
  std::optional<Clock::time_point> deadline_;
  std::optional<Ended> first_failure_;
};

}  // namespace tessera::launch
