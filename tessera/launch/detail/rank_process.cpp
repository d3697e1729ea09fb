#include "tessera/launch/detail/rank_process.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"

#include <fcntl.h>
#include <linux/close_range.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <sstream>

extern char** environ;

namespace tessera::launch {
namespace {

bool is_file(const std::string& path) {
  struct stat found {};
  return stat(path.c_str(), &found) == 0 && S_ISREG(found.st_mode);
}
bool is_executable(const std::string& path) { return is_file(path) && access(path.c_str(), X_OK) == 0; }

std::vector<std::string> environment_of(const RankPlan& plan) {
  std::vector<std::string> all;
  for (char** entry = environ; *entry; entry++) {
    const std::string text = *entry, name = text.substr(0, text.find('='));
    bool replaced = false;
    for (const auto& variable : plan.variables) replaced = replaced || variable.first == name;
    if (!replaced) all.push_back(text);
  }
  for (const auto& [name, value] : plan.variables) all.push_back(name + "=" + value);
  return all;
}

// A null-terminated array of C strings, for execve().
std::vector<char*> c_strings(std::vector<std::string>& texts) {
  std::vector<char*> all;
  for (auto& text : texts) all.push_back(text.data());
  all.push_back(nullptr);
  return all;
}

struct Pipe {
  int read_end = -1, write_end = -1;
  Pipe() {
    int ends[2];
    TESSERA_CHECK_ERRNO(pipe2(ends, O_CLOEXEC) == 0,
                        "cannot create a pipe for a rank (`ulimit -n` shows the limit of open files)");
    read_end = ends[0], write_end = ends[1];
  }
  ~Pipe() {
    for (const int fd : {read_end, write_end})
      if (fd >= 0) close(fd);
  }
  Pipe(const Pipe&) = delete;
  int take_read_end() {
    fcntl(read_end, F_SETFL, O_NONBLOCK);
    return std::exchange(read_end, -1);
  }
  void close_write_end() { close(std::exchange(write_end, -1)); }
};

}  // namespace

Command find_command(const std::vector<std::string>& arguments) {
  TESSERA_CHECK(!arguments.empty() && !arguments[0].empty(), UsageError,
                "no program to run; write it after --, as in  tessera run -n 4 -- ./app");
  const std::string& name = arguments[0];
  if (name.find('/') != std::string::npos) {
    TESSERA_CHECK(is_file(name), UsageError, "program '", name, "' not found");
    TESSERA_CHECK(is_executable(name), UsageError, "'", name,
                  "' is not executable; run chmod +x, or start it with its interpreter:  -- sh ", name);
    return {name, arguments};
  }
  std::istringstream folders(setting("PATH"));
  for (std::string folder; std::getline(folders, folder, ':');) {
    const std::string path = (folder.empty() ? "." : folder) + "/" + name;
    if (is_executable(path)) return {path, arguments};
  }
  TESSERA_FAIL(UsageError, "program '", name, "' not found in PATH",
               is_file(name) ? "; write ./" + name + " for the file in this folder" : "");
}

RankProcess start_rank(const Command& command, const RankPlan& plan, const Signals& signals) {
  // All memory is allocated before fork(): between fork and exec only async-signal-safe calls are allowed.
  auto arguments = command.arguments, variables = environment_of(plan);
  const auto argv = c_strings(arguments), env = c_strings(variables);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  for (const int core : plan.cores) CPU_SET(core, &cores);
  const bool reads_stdin = plan.local_rank == 0 && !isatty(STDIN_FILENO);
  const pid_t launcher = getpid();
  Pipe out, err, exec_error;  // `exec_error` carries errno of execve(); a successful execve() closes it

  const pid_t pid = fork();
  TESSERA_CHECK_ERRNO(pid >= 0, "cannot start rank ", plan.rank);
  if (pid == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != launcher) _exit(127);  // the launcher ended before the prctl call
    if (!reads_stdin) dup2(open("/dev/null", O_RDONLY | O_CLOEXEC), STDIN_FILENO);
    if (!plan.direct_output) dup2(out.write_end, STDOUT_FILENO);
    dup2(err.write_end, STDERR_FILENO);
    close_range(3, ~0U, CLOSE_RANGE_CLOEXEC);
    if (!plan.cores.empty()) sched_setaffinity(0, sizeof cores, &cores);
    signals.restore();
    execve(command.path.c_str(), argv.data(), env.data());
    const int error = errno;
    (void)!write(exec_error.write_end, &error, sizeof error);
    _exit(127);
  }
  setpgid(pid, pid);  // in parent and child: either may run first
  exec_error.close_write_end();
  int error = 0;
  ssize_t n = 0;
  while ((n = read(exec_error.read_end, &error, sizeof error)) < 0 && errno == EINTR) {
  }
  if (n == sizeof error) {
    waitpid(pid, nullptr, 0);
    raise_errno(error, c10::str("cannot execute '", command.path, "'"));
  }
  return {pid, plan.direct_output ? -1 : out.take_read_end(), err.take_read_end()};
}

}  // namespace tessera::launch
