#pragma once
#include <sys/types.h>

#include <chrono>
#include <cstdint>

namespace tessera::comm::watch {

// The status of a process of this machine, from /proc/<pid>/stat.
struct ProcessStatus {
  bool alive = false;       // false for a zombie too: it has ended, but its parent has not reaped it
  bool stopped = false;     // by a signal (SIGSTOP, ^Z); a stop by a debugger does not count
  uint64_t start_time = 0;  // in ticks since boot; distinguishes it from a later process with the same pid
};
ProcessStatus process_status(pid_t pid);

// A process that a signal has stopped for this long counts as lost. A job has to end within five seconds of a fault;
// the rest is for the ranks to report and to exit on a loaded machine.
constexpr std::chrono::milliseconds kStoppedBeforeLost(1500);

// How long another process has been stopped. The observer calls update() a few times per second.
class StoppedTime {
 public:
  using Clock = std::chrono::steady_clock;
  // Returns whether the process has been stopped for kStoppedBeforeLost. A longer pause between two calls counts as
  // half a second only: then the observer was stopped too (^Z stops all ranks of a job), or did not get a core.
  bool update(bool stopped, Clock::time_point now);

 private:
  std::chrono::nanoseconds total_{};
  Clock::time_point last_{};
};

}  // namespace tessera::comm::watch
