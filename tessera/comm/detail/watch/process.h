#pragma once
#include <sys/types.h>

#include <cstdint>

namespace tessera::comm::watch {

// How a process of this machine is, as /proc/<pid>/stat says.
struct Process {
  bool alive = false;    // false also for one that has ended and that nobody has asked for its exit code yet
  bool stopped = false;  // by a signal (SIGSTOP, ^Z); a debugger's stop does not count
  uint64_t started = 0;  // in ticks since boot: tells it from a later process of the same number
};
Process look_at_process(pid_t pid);

}  // namespace tessera::comm::watch
