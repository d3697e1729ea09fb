#include "tessera/launch/detail/local_ranks.h"

#include "tessera/base/error.h"
#include "tessera/base/error_file.h"

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
    TESSERA_CHECK(fd >= 0, UsageError, "cannot write the log file ", path, ": ", std::strerror(errno));
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

// A killed rank writes no error file. SIGABRT is different: an uncaught exception ends with it.
bool was_killed(const RankExit& exit) { return exit.signal != 0 && exit.signal != SIGABRT; }

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

std::vector<int> LocalRanks::poll_events(std::chrono::milliseconds timeout) {
  if (kill_deadline_) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*kill_deadline_ - Clock::now());
    if (left.count() <= 0) {
      send_signal(SIGKILL);
      kill_deadline_.reset();
    } else {
      timeout = std::min(timeout, left + std::chrono::milliseconds(1));
    }
  }
  std::vector<pollfd> waiting{{signals_.fd(), POLLIN, 0}, {signals_.stop_fd(), POLLIN, 0}};
  for (auto& rank : ranks_)
    for (const int fd : {rank->process.out, rank->process.err}) waiting.push_back({fd, POLLIN, 0});  // -1: skipped
  poll(waiting.data(), waiting.size(), static_cast<int>(timeout.count()));
  for (size_t i = 0; i < ranks_.size(); i++) {
    LocalRank& m = *ranks_[i];
    if (waiting[2 + 2 * i].revents) drain(m.process.out, m.out);
    if (waiting[3 + 2 * i].revents) drain(m.process.err, m.err);
  }
  auto received = signals_.read();
  if (std::erase(received, SIGCHLD) > 0) reap();
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
  stopping_ = true;
  send_signal(signal);
  send_signal(SIGCONT);  // a stopped process does not handle other signals
  kill_deadline_ = Clock::now() + grace_period;
}

const LocalRanks::LocalRank& LocalRanks::find(int64_t rank) const {
  for (const auto& m : ranks_)
    if (m->plan.rank == rank) return *m;
  TESSERA_FAIL(InternalError, "rank ", rank, " does not run on this host");
}

RankExit LocalRanks::root_cause() const {
  const RankExit& first = *first_failure_;
  int64_t earliest = write_time_ns(find(first.rank).plan.error_file);
  if (was_killed(first) || earliest < 0) return first;
  RankExit cause = first;
  for (const auto& m : ranks_) {
    const int64_t at = write_time_ns(m->plan.error_file);
    if (at < 0 || at >= earliest) continue;
    earliest = at;
    cause = m->exit.value_or(RankExit{m->plan.rank, m->process.pid, first.exit_code, first.signal});
  }
  if (was_killed(cause))  // the launcher killed it afterwards
    cause.exit_code = first.exit_code, cause.signal = first.signal;
  return cause;
}

std::string LocalRanks::error_message(int64_t rank) const {
  std::ostringstream text;
  text << std::ifstream(find(rank).plan.error_file).rdbuf();
  return tessera::detail::message_in(text.str());
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
