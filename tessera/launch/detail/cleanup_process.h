#pragma once
#include <sys/types.h>

#include <string>

namespace tessera::launch {

// A small child process that outlives the launcher. When the launcher ends, also by SIGKILL, it kills the registered
// process groups and removes the launcher's temporary folder.
// PR_SET_PDEATHSIG kills the ranks with the launcher, but not the processes that the ranks have started.
class CleanupProcess {
 public:
  static constexpr int kMaxGroups = 4096;  // process groups registered at a time

  explicit CleanupProcess(const std::string& folder);
  ~CleanupProcess();  // starts the cleanup and waits for it
  CleanupProcess(const CleanupProcess&) = delete;
  void add_group(pid_t group) { send(group); }
  void remove_group(pid_t group) { send(-group); }

 private:
  void send(pid_t message);  // > 0: add this group, < 0: remove it
  int pipe_ = -1;            // write end; the child sees end-of-file when the launcher ends
  pid_t pid_ = -1;
};

}  // namespace tessera::launch
