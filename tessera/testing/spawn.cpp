#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/testing/ranks.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

// A child is this program, started with fork and exec, because a process that has run torch must not only fork. A child
// that ran the body writes a file, so that a child that never reached the call does not count as a success. The
// variable TESSERA_SPAWN has the child's task: "call rank ranks backend timeout_ms file".
extern char** environ;

namespace tessera::testing {
namespace {

constexpr int kFailedExitCode = 10;

// The number of earlier spawn_processes calls with these arguments. A child that is started with them counts the same.
int count_call(const std::vector<std::string>& arguments) {
  static std::map<std::vector<std::string>, int> calls;
  return calls[arguments]++;
}

struct ChildTask {
  int call = 0;
  int64_t rank = 0, ranks = 1, timeout_ms = 0;
  std::string backend, file;
};

std::string to_text(const ChildTask& o) {
  return c10::str(o.call, " ", o.rank, " ", o.ranks, " ", o.backend, " ", o.timeout_ms, " ", o.file);
}
ChildTask parse_task(const std::string& text) {
  ChildTask o;
  std::istringstream in(text);
  in >> o.call >> o.rank >> o.ranks >> o.backend >> o.timeout_ms >> o.file;
  return o;
}

std::string ran_file(const ChildTask& o) { return c10::str(o.file, ".ran", o.rank); }

[[noreturn]] void run_child(const ChildTask& task, const Body& body, const std::function<bool()>& failed_expectations) {
  int code = 0;
  World world;
  const auto failed = [&](const std::string& message) {
    std::cout << "rank " << task.rank << " threw: " << message << std::endl;
    if (world) world.abort(c10::str("rank ", task.rank, " failed: ", message));
    code = kFailedExitCode;
  };
  try {
    at::set_num_threads(1);
    c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
    at::manual_seed(1234);
    InitOptions options;
    options.backend = task.backend;
    options.rank = task.rank;
    options.world_size = task.ranks;
    options.init_method = "file://" + task.file;
    options.timeout = std::chrono::milliseconds(task.timeout_ms);
    world = init(options);
    Rank me{task.rank, world};
    body(me);
    // A rank that exits early would make its peers fail.
    if (!(failed_expectations && failed_expectations())) me.group()->barrier().wait();
    destroy();
    std::ofstream(ran_file(task)) << "ran";
  } catch (const c10::Error& error) {
    failed(error.what_without_backtrace());
  } catch (const std::exception& error) {
    failed(error.what());
  }
  if (failed_expectations && failed_expectations()) code = kFailedExitCode;
  std::cout.flush();
  std::cerr.flush();
  std::fflush(nullptr);
  std::_Exit(code);  // backend threads may still run, and static destruction would race with them
}

struct Child {
  pid_t pid = -1;
  int status = 0;
  bool running = true;
  std::string output;  // path of the file
};

pid_t start(const ChildTask& task, const std::vector<std::string>& arguments, const std::string& output) {
  // Between fork and exec only system calls are allowed, so everything is prepared before fork().
  std::vector<std::string> words{"/proc/self/exe"}, variables;
  words.insert(words.end(), arguments.begin(), arguments.end());
  for (char** v = environ; *v; v++)
    if (std::string_view(*v).substr(0, 14) != "TESSERA_SPAWN=") variables.emplace_back(*v);
  variables.push_back("TESSERA_SPAWN=" + to_text(task));
  std::vector<char*> argv, env;
  for (auto& w : words) argv.push_back(w.data());
  for (auto& v : variables) env.push_back(v.data());
  argv.push_back(nullptr);
  env.push_back(nullptr);
  const pid_t pid = fork();
  if (pid != 0) return pid;
  const int out = open(output.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
  dup2(out, STDOUT_FILENO);
  dup2(out, STDERR_FILENO);
  execve("/proc/self/exe", argv.data(), env.data());
  _exit(127);
}

std::string how_it_ended(const Child& child) {
  if (WIFSIGNALED(child.status)) return c10::str("was killed by signal ", WTERMSIG(child.status));
  return c10::str("exited with ", WEXITSTATUS(child.status));
}

std::string read_file(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

struct TemporaryFolder {
  std::string path;
  TemporaryFolder() {
    const char* base = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    path = c10::str(base, "/tessera-spawn-XXXXXX");
    TESSERA_CHECK(mkdtemp(path.data()), InternalError, "cannot create a folder in ", base);
  }
  void remove(const std::string& name) { unlink((path + "/" + name).c_str()); }
  ~TemporaryFolder() { rmdir(path.c_str()); }
};

}  // namespace

void spawn_processes(int64_t n, const Body& body, const SpawnOptions& options,
                     const std::function<bool()>& failed_expectations) {
  const int call = count_call(options.arguments);
  if (setting_is_set("TESSERA_SPAWN")) {
    const ChildTask task = parse_task(setting("TESSERA_SPAWN"));
    if (task.call != call) return;  // a child whose task is a later call
    run_child(task, body, failed_expectations);
  }
  TemporaryFolder folder;
  std::vector<Child> children(static_cast<size_t>(n));
  for (int64_t rank = 0; rank < n; rank++) {
    Child& child = children[static_cast<size_t>(rank)];
    child.output = c10::str(folder.path, "/out", rank);
    child.pid = start({call, rank, n, options.timeout.count() * 3 / 4, options.backend, folder.path + "/store"},
                      options.arguments, child.output);
  }
  const auto deadline = std::chrono::steady_clock::now() + options.timeout;
  std::string report;
  bool stopping = false;
  for (size_t running = children.size(); running > 0;) {
    for (size_t r = 0; r < children.size(); r++) {
      Child& child = children[r];
      if (!child.running || waitpid(child.pid, &child.status, WNOHANG) == 0) continue;
      child.running = false;
      running--;
      const bool ended_well = WIFEXITED(child.status) && WEXITSTATUS(child.status) == 0;
      const bool ran = ::access(c10::str(folder.path, "/store.ran", r).c_str(), F_OK) == 0;
      if (ended_well && !ran)
        report += c10::str("\nrank ", r, " never reached this call of spawn_ranks:\n", read_file(child.output));
      else if (!ended_well && !stopping)
        report += c10::str("\nrank ", r, " ", how_it_ended(child), ":\n", read_file(child.output));
    }
    const bool late = std::chrono::steady_clock::now() > deadline;
    if (!stopping && late) {
      stopping = true;
      for (size_t r = 0; r < children.size(); r++)
        if (children[r].running) {
          report += c10::str("\nrank ", r, " was still running after ", options.timeout.count() / 1000, " s:\n",
                             read_file(children[r].output));
          kill(children[r].pid, SIGKILL);
        }
    }
    if (running) usleep(2000);
  }
  for (size_t r = 0; r < children.size(); r++) {
    folder.remove(c10::str("out", r));
    folder.remove(c10::str("store.ran", r));
  }
  folder.remove("store");
  if (!report.empty()) throw std::runtime_error(c10::str("some of ", n, " process ranks failed:", report));
}

}  // namespace tessera::testing
