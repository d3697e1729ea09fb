#include "tessera/launch/detail/cleanup_process.h"

#include "tessera/base/detail/system_error.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>

namespace tessera::launch {
namespace {

[[noreturn]] void run_cleanup_process(int pipe, const std::string& folder) {
  setsid();  // no signals from the terminal
  prctl(PR_SET_NAME, "tessera-cleanup");
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);  // only SIGKILL ends it early; ranks still have their PR_SET_PDEATHSIG
  dup2(pipe, STDIN_FILENO);
  close_range(1, ~0U, 0);  // otherwise a reader of the launcher's output would wait for this process
  pid_t groups[CleanupProcess::kMaxGroups];
  int count = 0;
  for (pid_t message = 0;;) {
    const ssize_t n = read(STDIN_FILENO, &message, sizeof message);
    if (n < 0 && errno == EINTR) continue;
    if (n != sizeof message) break;  // the launcher has ended
    if (message > 0 && count < CleanupProcess::kMaxGroups) groups[count++] = message;
    if (message < 0) count = static_cast<int>(std::remove(groups, groups + count, -message) - groups);
  }
  for (int i = 0; i < count; i++) kill(-groups[i], SIGKILL);
  std::error_code ignored;
  if (!folder.empty()) std::filesystem::remove_all(folder, ignored);
  _exit(0);
}

}  // namespace

CleanupProcess::CleanupProcess(const std::string& folder) {
  int ends[2];
  TESSERA_CHECK_ERRNO(pipe2(ends, O_CLOEXEC) == 0, "cannot create a pipe for the cleanup process");
  pid_ = fork();
  TESSERA_CHECK_ERRNO(pid_ >= 0, "cannot start the cleanup process");
  if (pid_ == 0) {
    close(ends[1]);
    run_cleanup_process(ends[0], folder);
  }
  close(ends[0]);
  pipe_ = ends[1];
}

CleanupProcess::~CleanupProcess() {
  close(pipe_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void CleanupProcess::send(pid_t message) {
  (void)!write(pipe_, &message, sizeof message);  // fails only if the cleanup process was killed
}

}  // namespace tessera::launch
