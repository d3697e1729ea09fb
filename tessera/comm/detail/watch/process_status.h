#pragma once
#include <sys/types.h>

#include <cstdint>

namespace tessera::comm::watch {

// The status of a process of this machine, from /proc/<pid>/stat.
struct ProcessStatus {
  bool alive = false;       // false for a zombie too: it has ended, but its parent has not reaped it
  bool stopped = false;     // by a signal (SIGSTOP, ^Z); a stop by a debugger does not count
  uint64_t start_time = 0;  // in ticks since boot; distinguishes it from a later process with the same pid
};
ProcessStatus process_status(pid_t pid);

}  // namespace tessera::comm::watch
