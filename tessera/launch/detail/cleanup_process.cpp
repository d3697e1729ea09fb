#include "tessera/launch/detail/cleanup_process.h"

#include "tessera/base/error.h"

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

[[noreturn]] void keep_guard(int line, const std::string& folder) {
  setsid();  // signals of the terminal are not for us
  prctl(PR_SET_NAME, "tessera-guard");
  sigset_t all;
  sigfillset(&all);
  sigprocmask(SIG_BLOCK, &all, nullptr);  // only kill -9 ends it early; the ranks still have their death signal
  dup2(line, STDIN_FILENO);
  close_range(1, ~0U, 0);  // or whoever reads the launcher's output would wait for us
  pid_t groups[Guard::kMost];
  int count = 0;
  for (pid_t word = 0;;) {
    const ssize_t n = read(STDIN_FILENO, &word, sizeof word);
    if (n < 0 && errno == EINTR) continue;
    if (n != sizeof word) break;  // the launcher has ended
    if (word > 0 && count < Guard::kMost) groups[count++] = word;
    if (word < 0) count = static_cast<int>(std::remove(groups, groups + count, -word) - groups);
  }
  for (int i = 0; i < count; i++) kill(-groups[i], SIGKILL);
  std::error_code ignored;
  if (!folder.empty()) std::filesystem::remove_all(folder, ignored);
  _exit(0);
}

}  // namespace

Guard::Guard(const std::string& folder) {
  int ends[2];
  TESSERA_CHECK(pipe2(ends, O_CLOEXEC) == 0, InternalError, "no pipe for the guard: errno ", errno);
  pid_ = fork();
  TESSERA_CHECK(pid_ >= 0, InternalError, "cannot start the guard: errno ", errno);
  if (pid_ == 0) {
    close(ends[1]);
    keep_guard(ends[0], folder);
  }
  close(ends[0]);
  line_ = ends[1];
}

Guard::~Guard() {
  close(line_);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guard::tell(pid_t word) { (void)!write(line_, &word, sizeof word); }  // a guard that was killed guards no more

}  // namespace tessera::launch
