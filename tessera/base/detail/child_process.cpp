#include "tessera/base/detail/child_process.h"

#include "tessera/base/error.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>

extern char** environ;

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

// Waits until the pipe can be read. False: the time is over.
bool wait_for_output(int pipe, Clock::time_point until) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    if (left < 0) return false;
    pollfd entry{pipe, POLLIN, 0};
    const int ready = poll(&entry, 1, static_cast<int>(std::min<int64_t>(left + 1, 60'000)));
    if (ready > 0 || (ready < 0 && errno != EINTR)) return true;
  }
}

}  // namespace

ChildResult run_child(const std::vector<std::string>& command, ChildErrors errors, std::chrono::milliseconds limit) {
  int ends[2];
  TESSERA_CHECK(pipe2(ends, O_CLOEXEC) == 0, InternalError, "cannot create a pipe for ", command.at(0), ": errno ",
                errno);

  std::vector<char*> argv;
  for (const auto& argument : command) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
  if (errors == ChildErrors::InOutput) posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
  if (errors == ChildErrors::Dropped)
    posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  if (limit.count() > 0) posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // to kill its children too
  pid_t pid = -1;
  int error = posix_spawnp(&pid, argv[0], &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(ends[1]);

  ChildResult result;
  if (error != 0) {
    close(ends[0]);
    result.exit_code = 127;
    return result;
  }
  std::array<char, 4096> buffer;
  const auto until = Clock::now() + limit;
  for (;;) {
    if (limit.count() > 0 && !wait_for_output(ends[0], until)) {
      result.timed_out = true;
      kill(-pid, SIGKILL);
      break;
    }
    ssize_t n = read(ends[0], buffer.data(), buffer.size());
    if (n > 0) result.out.append(buffer.data(), static_cast<size_t>(n));
    if (n == 0 || (n < 0 && errno != EINTR)) break;
  }
  close(ends[0]);
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  result.exit_code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return result;
}

}  // namespace tessera
