#include "tessera/comm/detail/watch/process_status.h"

#include <c10/util/StringUtil.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

namespace tessera::comm::watch {

// "4711 (a name (with) brackets) S 1 ...": the state follows the last bracket, the start time is 19 fields later.
ProcessStatus process_status(pid_t pid) {
  ProcessStatus found;
  char text[1024];
  const int fd = open(c10::str("/proc/", pid, "/stat").c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return found;
  const ssize_t size = read(fd, text, sizeof text);
  close(fd);
  if (size <= 0) return found;
  const std::string line(text, static_cast<size_t>(size));
  const size_t bracket = line.rfind(')');
  if (bracket == std::string::npos) return found;
  std::istringstream fields(line.substr(bracket + 1));
  std::string state, skipped;
  fields >> state;
  for (int i = 0; i < 18; i++) fields >> skipped;
  fields >> found.start_time;
  found.alive = state != "Z" && state != "X";
  found.stopped = state == "T";
  return found;
}

bool StoppedTime::update(bool stopped, Clock::time_point now) {
  constexpr std::chrono::nanoseconds kLongestPause = std::chrono::milliseconds(500);
  const bool was_stopped = last_ != Clock::time_point();
  total_ = stopped && was_stopped ? total_ + std::min(now - last_, kLongestPause) : std::chrono::nanoseconds(0);
  last_ = stopped ? now : Clock::time_point();
  return total_ >= kStoppedBeforeLost;
}

}  // namespace tessera::comm::watch
