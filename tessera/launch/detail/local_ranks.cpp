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
  std::optional<Sink> sink;
  LogFile(const CrewOutput& output, int64_t rank, const char* ending) {
    if (output.log_folder.empty()) return;
    path = c10::str(output.log_folder, "/rank_", rank, ending);
    fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | (output.append ? O_APPEND : O_TRUNC), 0644);
    TESSERA_CHECK(fd >= 0, UsageError, "cannot write the log ", path, ": ", std::strerror(errno));
    sink.emplace(fd);
  }
  ~LogFile() {
    if (fd >= 0) close(fd);
  }
  LogFile(const LogFile&) = delete;
  Sink* get() { return sink ? &*sink : nullptr; }
};

std::string prefix_of(int64_t rank, bool wanted, bool colour) {
  if (!wanted) return "";
  const std::string text = c10::str("[rank ", rank, "] ");
  return colour ? c10::str("\x1b[", 31 + rank % 6, "m", text, "\x1b[0m") : text;
}

Ended how(int64_t rank, pid_t pid, int status) {
  if (WIFSIGNALED(status)) return {rank, pid, 128 + WTERMSIG(status), WTERMSIG(status)};
  return {rank, pid, WEXITSTATUS(status), 0};
}

// Without last words by nature. SIGABRT is how an exception that nobody catches ends.
bool was_killed(const Ended& ended) { return ended.signal != 0 && ended.signal != SIGABRT; }

int64_t nanoseconds_of(const std::string& path) {  // when the file was written; -1: there is none
  struct stat found {};
  if (stat(path.c_str(), &found) != 0) return -1;
  return found.st_mtim.tv_sec * 1'000'000'000 + found.st_mtim.tv_nsec;
}

}  // namespace

struct Crew::Member {
  Member(const RankPlan& plan, const CrewOutput& output)
      : plan(plan),
        log_out(output, plan.rank, ".out"),
        log_err(output, plan.rank, ".err"),
        out(prefix_of(plan.rank, output.prefix, output.colour_out), shown(output) ? output.out : nullptr,
            log_out.get()),
        err(prefix_of(plan.rank, output.prefix, output.colour_err), shown(output) ? output.err : nullptr,
            log_err.get()) {}
  bool shown(const CrewOutput& output) const { return !output.shown || output.shown->contains(plan.rank); }

  const RankPlan plan;
  LogFile log_out, log_err;
  LineStream out, err;
  RankProcess process;
  std::optional<Ended> ended;
};

Crew::Crew(const Program& program, const std::vector<RankPlan>& plans, const CrewOutput& output, const Signals& signals,
           Guard& guard)
    : signals_(signals), guard_(guard) {
  TESSERA_CHECK(plans.size() <= Guard::kMost, UsageError, plans.size(), " ranks on one host; at most ", Guard::kMost);
  for (const auto& plan : plans) members_.push_back(std::make_unique<Member>(plan, output));
  try {
    for (auto& member : members_) {
      member->process = start_rank(program, member->plan, signals);
      guard_.watch(member->process.pid);
    }
  } catch (...) {
    stop(SIGKILL, std::chrono::milliseconds(0));
    while (running() > 0) turn(std::chrono::milliseconds(1000));
    throw;
  }
}

Crew::~Crew() {
  stop(SIGKILL, std::chrono::milliseconds(0));
  while (running() > 0) turn(std::chrono::milliseconds(1000));
  for (auto& member : members_)
    for (const int fd : {member->process.out, member->process.err})
      if (fd >= 0) close(fd);
}

int64_t Crew::running() const {
  return std::count_if(members_.begin(), members_.end(), [](const auto& m) { return m->process.pid > 0 && !m->ended; });
}

std::vector<int> Crew::turn(std::chrono::milliseconds at_most) {
  if (deadline_) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(*deadline_ - Clock::now());
    if (left.count() <= 0) {
      pass_on(SIGKILL);
      deadline_.reset();
    } else {
      at_most = std::min(at_most, left + std::chrono::milliseconds(1));
    }
  }
  std::vector<pollfd> waiting{{signals_.fd(), POLLIN, 0}, {signals_.stop_fd(), POLLIN, 0}};
  for (auto& member : members_)
    for (const int fd : {member->process.out, member->process.err}) waiting.push_back({fd, POLLIN, 0});  // -1: skipped
  poll(waiting.data(), waiting.size(), static_cast<int>(at_most.count()));
  for (size_t i = 0; i < members_.size(); i++) {
    Member& m = *members_[i];
    if (waiting[2 + 2 * i].revents) drain(m.process.out, m.out);
    if (waiting[3 + 2 * i].revents) drain(m.process.err, m.err);
  }
  auto came = signals_.read();
  if (std::erase(came, SIGCHLD) > 0) reap();
  return came;
}

// What can be read now, at most a few rounds, so that one rank that prints without end does not silence the others.
void Crew::drain(int& fd, LineStream& stream) {
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

void Crew::reap() {
  std::vector<Ended> failed;
  for (auto& m : members_) {
    const pid_t pid = m->process.pid;
    siginfo_t info{};
    if (pid <= 0 || m->ended || waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 ||
        info.si_pid == 0)
      continue;
    kill(-pid, SIGKILL);  // what it has left behind; its number is not free before waitpid
    guard_.forget(pid);
    int status = 0;
    waitpid(pid, &status, 0);
    m->ended = how(m->plan.rank, pid, status);
    if (!m->ended->ok()) failed.push_back(*m->ended);
    // All it printed is in the pipes by now. Somebody who left its group may hold them open: we do not wait for that.
    for (auto [fd, stream] : {std::pair{&m->process.out, &m->out}, std::pair{&m->process.err, &m->err}}) {
      drain_all(*fd, *stream);
      if (*fd >= 0) close(std::exchange(*fd, -1));
      stream->finish();
    }
  }
  if (first_failure_ || failed.empty()) return;
  // Several at once: who was killed could not have been told by another's end, as who exited could.
  const auto killed = std::find_if(failed.begin(), failed.end(), was_killed);
  first_failure_ = killed != failed.end() ? *killed : failed.front();
}

void Crew::drain_all(int& fd, LineStream& stream) {
  for (;;) {
    pollfd ready{fd, POLLIN, 0};
    if (fd < 0 || poll(&ready, 1, 0) != 1 || !(ready.revents & POLLIN)) return;
    drain(fd, stream);
  }
}

void Crew::pass_on(int signal) {
  for (auto& m : members_)
    if (m->process.pid > 0 && !m->ended) kill(-m->process.pid, signal);
}

void Crew::stop(int signal, std::chrono::milliseconds grace) {
  stopping_ = true;
  pass_on(signal);
  pass_on(SIGCONT);  // one that was stopped hears nothing else
  deadline_ = Clock::now() + grace;
}

const Crew::Member& Crew::member(int64_t rank) const {
  for (const auto& m : members_)
    if (m->plan.rank == rank) return *m;
  TESSERA_FAIL(InternalError, "rank ", rank, " is not of this host");
}

Ended Crew::cause() const {
  const Ended& first = *first_failure_;
  int64_t earliest = nanoseconds_of(member(first.rank).plan.error_file);
  if (was_killed(first) || earliest < 0) return first;
  Ended cause = first;
  for (const auto& m : members_) {
    const int64_t at = nanoseconds_of(m->plan.error_file);
    if (at < 0 || at >= earliest) continue;
    earliest = at;
    cause = m->ended.value_or(Ended{m->plan.rank, m->process.pid, first.exit_code, first.signal});
  }
  if (was_killed(cause)) cause.exit_code = first.exit_code, cause.signal = first.signal;  // by us, on its way out
  return cause;
}

std::string Crew::last_words(int64_t rank) const {
  std::ostringstream text;
  text << std::ifstream(member(rank).plan.error_file).rdbuf();
  return tessera::detail::message_in(text.str());
}

std::vector<std::string> Crew::last_lines(int64_t rank) const {
  const auto& lines = member(rank).err.last_lines();
  return {lines.begin(), lines.end()};
}

std::vector<std::string> Crew::broken_logs() const {
  std::vector<std::string> broken;
  for (const auto& m : members_)
    for (const auto* log : {&m->log_out, &m->log_err})
      if (log->sink && log->sink->closed()) broken.push_back(log->path);
  return broken;
}

std::ostream& operator<<(std::ostream& out, const Ended& ended) {
  out << "rank " << ended.rank << " (pid " << ended.pid << ") ";
  if (ended.signal) return out << "was ended by signal " << ended.signal << " (" << strsignal(ended.signal) << ")";
  return out << "exited with code " << ended.exit_code;
}

}  // namespace tessera::launch
