#include "tessera/base/detail/child_process.h"

#include "tessera/base/error.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>

extern char** environ;

namespace tessera {

ChildResult run_child(const std::vector<std::string>& command, ChildErrors errors) {
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
  pid_t pid = -1;
  int error = posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);

  ChildResult result;
  if (error != 0) {
    close(ends[0]);
    result.exit_code = 127;
    return result;
  }
  std::array<char, 4096> buffer;
  for (;;) {
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
