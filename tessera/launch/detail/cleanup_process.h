#pragma once
#include <sys/types.h>

#include <string>

namespace tessera::launch {

// A small process that outlives us, however we end: it then kills the process groups it was told of, and removes our
// folder. A kill -9 of the launcher takes its ranks along by PR_SET_PDEATHSIG, but not what the ranks have started.
class Guard {
 public:
  static constexpr int kMost = 4096;  // process groups at a time

  explicit Guard(const std::string& folder);
  ~Guard();  // lets it do its work, and waits for it
  Guard(const Guard&) = delete;
  void watch(pid_t group) { tell(group); }
  void forget(pid_t group) { tell(-group); }

 private:
  void tell(pid_t word);
  int line_ = -1;  // it reads from the other end; the line ends when we do
  pid_t pid_ = -1;
};

}  // namespace tessera::launch
