#include "tessera/launch/detail/local_ranks.h"

#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/detail/watch/process_status.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <ostream>
#include <sstream>

namespace tessera::launch {
namespace {

struct LogFile {
  int fd = -1;
  std::string path;
  std::optional<OutputSink> sink;
  LogFile(const RankOutput& output, int64_t rank, const char* ending) {
    if (output.log_dir.empty()) return;
    path = c10::str(output.log_dir, "/rank_", rank, ending);
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (output.append ? O_APPEND : O_TRUNC), 0644);
    TESSERA_CHECK_ERRNO(fd >= 0, "cannot write the log file ", path);
    sink.emplace(fd);
  }
  ~LogFile() {
    if (fd >= 0) close(fd);
  }
  LogFile(const LogFile&) = delete;
  OutputSink* get() { return sink ? &*sink : nullptr; }
};

std::string prefix_of(int64_t rank, bool enabled, bool colour) {
  if (!enabled) return "";
  const std::string text = c10::str("[rank ", rank, "] ");
  return colour ? c10::str("\x1b[", 31 + rank % 6, "m", text, "\x1b[0m") : text;
}

RankExit rank_exit(int64_t rank, pid_t pid, int status) {
  if (WIFSIGNALED(status)) return {rank, pid, 128 + WTERMSIG(status), WTERMSIG(status)};
  return {rank, pid, WEXITSTATUS(status), 0};
}

// How long the rank that is the root cause may take to exit: static destructors of LibTorch and of the program.
constexpr std::chrono::milliseconds kTimeToExit(2000);
using comm::watch::kStoppedBeforeLost;

// A killed rank writes no error file. SIGABRT is different: an uncaught exception ends with it.
bool was_killed(const RankExit& exit) { return exit.signal != 0 && exit.signal != SIGABRT; }

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

int64_t write_time_ns(const std::string& path) {  // -1: no such file
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) return -1;
  return found.st_mtim.tv_sec * 1'000'000'000 + found.st_mtim.tv_nsec;
}

}  // namespace

struct LocalRanks::LocalRank {
  LocalRank(const RankPlan& plan, const RankOutput& output)
      : plan(plan),
        log_out(output, plan.rank, ".out"),
        log_err(output, plan.rank, ".err"),
        out(prefix_of(plan.rank, output.prefix, output.colour_out), is_shown(output) ? output.out : nullptr,
            log_out.get()),
        err(prefix_of(plan.rank, output.prefix, output.colour_err), is_shown(output) ? output.err : nullptr,
            log_err.get()) {}
  bool is_shown(const RankOutput& output) const {
    return !output.ranks_shown || output.ranks_shown->contains(plan.rank);
  }

  const RankPlan plan;
  LogFile log_out, log_err;
  LineStream out, err;
  RankProcess process;
  std::optional<RankExit> exit;
  std::optional<Clock::time_point> stopped_since;  // by a signal; nullopt: it runs
  bool signalled = false;                          // by stop()
  bool was_running = false, was_stopped = false;   // when stop() was called
};

LocalRanks::LocalRanks(const Command& command, const std::vector<RankPlan>& plans, const RankOutput& output,
                       const Signals& signals, CleanupProcess& cleanup)
    : signals_(signals), cleanup_(cleanup) {
  TESSERA_CHECK(plans.size() <= CleanupProcess::kMaxGroups, UsageError, plans.size(), " ranks on one host; at most ",
                CleanupProcess::kMaxGroups, " are supported");
  for (const auto& plan : plans) ranks_.push_back(std::make_unique<LocalRank>(plan, output));
  try {
    for (auto& rank : ranks_) {
      rank->process = start_rank(command, rank->plan, signals);
      cleanup_.add_group(rank->process.pid);
    }
  } catch (...) {
    stop(SIGKILL, std::chrono::milliseconds(0));
    while (running() > 0) poll_events(std::chrono::milliseconds(1000));
    throw;
  }
}

LocalRanks::~LocalRanks() {
  stop(SIGKILL, std::chrono::milliseconds(0));
  while (running() > 0) poll_events(std::chrono::milliseconds(1000));
  for (auto& rank : ranks_)
    for (const int fd : {rank->process.out, rank->process.err})
      if (fd >= 0) close(fd);
}

int64_t LocalRanks::running() const {
  return std::count_if(ranks_.begin(), ranks_.end(), [](const auto& m) { return m->process.pid > 0 && !m->exit; });
}

std::chrono::milliseconds LocalRanks::time_to_next_deadline(std::chrono::milliseconds at_most) const {
  const auto include = [&, now = Clock::now()](Clock::time_point deadline) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - now);
    at_most = std::clamp(left, std::chrono::milliseconds(0), at_most);  // it may have passed since the last poll
  };
  if (kill_deadline_) include(*kill_deadline_);
  if (late_signal_deadline_) include(*late_signal_deadline_);
  for (const auto& m : ranks_)
    if (m->stopped_since && !m->exit && !is_absent(*m)) include(*m->stopped_since + kStoppedBeforeLost);
  return at_most;
}

void LocalRanks::send_due_signals() {
  if (late_signal_deadline_ && *late_signal_deadline_ <= now_) {
    late_signal_deadline_.reset();
    for (auto& m : ranks_)
      if (m->process.pid > 0 && !m->exit && !m->signalled) kill(-m->process.pid, SIGTERM);
  }
  if (kill_deadline_ && *kill_deadline_ <= now_) {
    kill_deadline_.reset();
    send_signal(SIGKILL);
  }
}

std::vector<int> LocalRanks::poll_events(std::chrono::milliseconds timeout) {
  timeout = time_to_next_deadline(timeout);
  std::vector<pollfd> waiting{{signals_.fd(), POLLIN, 0}, {signals_.stop_fd(), POLLIN, 0}};
  for (auto& rank : ranks_)
    for (const int fd : {rank->process.out, rank->process.err}) waiting.push_back({fd, POLLIN, 0});  // -1: skipped
  const int events = poll(waiting.data(), waiting.size(), static_cast<int>(timeout.count()));
  now_ = Clock::now();
  send_due_signals();
  for (size_t i = 0; i < ranks_.size(); i++) {
    LocalRank& m = *ranks_[i];
    if (waiting[2 + 2 * i].revents) drain(m.process.out, m.out);
    if (waiting[3 + 2 * i].revents) drain(m.process.err, m.err);
  }
  auto received = signals_.read();
  if (std::erase(received, SIGCHLD) > 0 || events == 0) reap();
  return received;
}

// Reads what is available, in at most four rounds, so that one rank with endless output does not starve the others.
void LocalRanks::drain(int& fd, LineStream& stream) {
  std::array<char, 1 << 16> buffer;
  for (int round = 0; round < 4 && fd >= 0; round++) {
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n > 0) {
      stream.feed({buffer.data(), static_cast<size_t>(n)});
    } else if (n == 0 || (errno != EINTR && errno != EAGAIN)) {
      close(std::exchange(fd, -1));
      stream.finish();
    } else {
      return;
    }
  }
}

void LocalRanks::reap() {
  std::vector<RankExit> failed;
  for (auto& m : ranks_) {
    const pid_t pid = m->process.pid;
    if (pid > 0 && !m->exit) read_stops(*m);
    siginfo_t info{};
    if (pid <= 0 || m->exit || waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0)
      continue;
    kill(-pid, SIGKILL);  // its children; the process group id stays valid until waitpid
    cleanup_.remove_group(pid);
    int status = 0;
    waitpid(pid, &status, 0);
    m->exit = rank_exit(m->plan.rank, pid, status);
    if (!m->exit->ok()) failed.push_back(*m->exit);
    // All output of the rank is in the pipes now. A process that left its group may hold them open; do not wait for it.
    for (auto [fd, stream] : {std::pair{&m->process.out, &m->out}, std::pair{&m->process.err, &m->err}}) {
      drain_all(*fd, *stream);
      if (*fd >= 0) close(std::exchange(*fd, -1));
      stream->finish();
    }
  }
  if (first_failure_ || failed.empty()) return;
  // If several ranks failed at once, prefer one that was killed: one that exited may have reacted to another failure.
  const auto killed = std::find_if(failed.begin(), failed.end(), was_killed);
  first_failure_ = killed != failed.end() ? *killed : failed.front();
}

void LocalRanks::read_stops(LocalRank& rank) {
  siginfo_t info{};
  while (waitid(P_PID, static_cast<id_t>(rank.process.pid), &info, WSTOPPED | WCONTINUED | WNOHANG) == 0 &&
         info.si_pid != 0) {
    if (info.si_code == CLD_CONTINUED) rank.stopped_since.reset();
    if (info.si_code == CLD_STOPPED) rank.stopped_since = Clock::now();
    info = {};
  }
}

bool LocalRanks::is_absent(const LocalRank& rank) const {
  if (rank.exit) return rank.exit->ok();
  return rank.stopped_since && *rank.stopped_since + kStoppedBeforeLost <= now_;
}

std::map<int64_t, std::string> LocalRanks::absent() const {
  std::map<int64_t, std::string> found;
  for (const auto& m : ranks_)
    if (is_absent(*m)) found[m->plan.rank] = what_it_did(m->plan.rank);
  return found;
}

void LocalRanks::drain_all(int& fd, LineStream& stream) {
  for (;;) {
    pollfd ready{fd, POLLIN, 0};
    if (fd < 0 || poll(&ready, 1, 0) != 1 || !(ready.revents & POLLIN)) return;
    drain(fd, stream);
  }
}

void LocalRanks::send_signal(int signal) {
  for (auto& m : ranks_)
    if (m->process.pid > 0 && !m->exit) kill(-m->process.pid, signal);
}

void LocalRanks::stop(int signal, std::chrono::milliseconds grace_period) {
  const auto now = Clock::now();
  const int64_t cause = signal == SIGTERM && first_failure_ ? root_cause().rank : -1;
  for (auto& m : ranks_) {
    if (m->process.pid <= 0 || m->exit) continue;
    if (!stopping_) m->was_running = true, m->was_stopped = m->stopped_since.has_value();
    if (m->plan.rank == cause) {
      late_signal_deadline_ = now + kTimeToExit;
      continue;
    }
    m->signalled = true;
    kill(-m->process.pid, signal);
  }
  stopping_ = true;
  send_signal(SIGCONT);  // a stopped process does not handle other signals
  kill_deadline_ = now + grace_period;
}

const LocalRanks::LocalRank* LocalRanks::find_local(int64_t rank) const {
  for (const auto& m : ranks_)
    if (m->plan.rank == rank) return m.get();
  return nullptr;
}

const LocalRanks::LocalRank& LocalRanks::find(int64_t rank) const {
  const LocalRank* found = find_local(rank);
  TESSERA_CHECK(found, InternalError, "rank ", rank, " does not run on this host");
  return *found;
}

RankExit LocalRanks::root_cause() const {
  const RankExit& first = *first_failure_;
  const LocalRank* cause = &find(first.rank);
  int64_t earliest = write_time_ns(cause->plan.error_file);
  if (was_killed(first) || earliest < 0) return first;
  for (const auto& m : ranks_) {
    const int64_t at = write_time_ns(m->plan.error_file);
    if (at < 0 || at >= earliest) continue;
    earliest = at;
    cause = m.get();
  }
  // A victim may name another victim, which names the culprit.
  for (size_t i = 0; i < ranks_.size(); i++) {
    const LocalRank* named = find_local(tessera::detail::culprit_in(read_file(cause->plan.error_file)));
    if (!named || named == cause || write_time_ns(named->plan.error_file) < 0) break;
    cause = named;
  }
  RankExit exit = cause->exit.value_or(RankExit{cause->plan.rank, cause->process.pid, first.exit_code, first.signal});
  if (was_killed(exit) || exit.ok())  // the launcher killed it afterwards, or it has no code of its own
    exit.exit_code = first.exit_code, exit.signal = first.signal;
  return exit;
}

std::string LocalRanks::culprit() const {
  const int64_t cause = root_cause().rank;
  const int64_t named = tessera::detail::culprit_in(read_file(find(cause).plan.error_file));
  if (named < 0 || named == cause || was_killed(*first_failure_)) return "";
  const LocalRank* local = find_local(named);
  if (!local) return c10::str("rank ", named, " on another host is the cause");
  return write_time_ns(local->plan.error_file) >= 0 ? "" : what_it_did(named);
}

std::string LocalRanks::what_it_did(int64_t rank) const {
  const LocalRank& m = find(rank);
  std::ostringstream text;
  if (m.exit && !m.was_running) {
    text << *m.exit;
    return text.str();
  }
  text << "rank " << rank << " (pid " << m.process.pid << ") ";
  const bool stopped = m.was_stopped || m.stopped_since;
  text << (stopped ? "is stopped by a signal (SIGSTOP or ^Z)" : "was still running");
  return text.str();
}

std::string LocalRanks::error_message(int64_t rank) const {
  return tessera::detail::message_in(read_file(find(rank).plan.error_file));
}

std::vector<std::string> LocalRanks::stderr_tail(int64_t rank) const {
  const auto& lines = find(rank).err.tail();
  return {lines.begin(), lines.end()};
}

std::vector<std::string> LocalRanks::incomplete_logs() const {
  std::vector<std::string> incomplete;
  for (const auto& m : ranks_)
    for (const auto* log : {&m->log_out, &m->log_err})
      if (log->sink && log->sink->closed()) incomplete.push_back(log->path);
  return incomplete;
}

std::ostream& operator<<(std::ostream& out, const RankExit& exit) {
  out << "rank " << exit.rank << " (pid " << exit.pid << ") ";
  if (exit.signal) return out << "was killed by signal " << exit.signal << " (" << strsignal(exit.signal) << ")";
  return out << "exited with code " << exit.exit_code;
}

}  // namespace tessera::launch
