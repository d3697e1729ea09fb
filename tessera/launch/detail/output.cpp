#include "tessera/launch/detail/output.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace tessera::launch {

void OutputSink::write(std::string_view text) {
  constexpr size_t kAtomicBytes = 4096;  // a pipe that poll() reports as writable takes this much without blocking
  while (!text.empty() && !closed_ && !dropping_) {
    pollfd ends[2] = {{fd_, POLLOUT, 0}, {interrupt_fd_, POLLIN, 0}};
    if (poll(ends, 2, -1) < 0) continue;
    if (!(ends[0].revents & (POLLOUT | POLLERR | POLLNVAL))) {
      dropping_ = ends[1].revents != 0;
      continue;
    }
    const ssize_t n = ::write(fd_, text.data(), std::min(text.size(), kAtomicBytes));
    if (n > 0) text.remove_prefix(static_cast<size_t>(n));
    if (n < 0 && errno != EINTR && errno != EAGAIN) closed_ = true;
  }
}

void LineStream::feed(std::string_view bytes) {
  if (log_) log_->write(bytes);
  while (!bytes.empty()) {
    const size_t room = kMaxLineBytes - line_.size();
    const size_t end = std::min(bytes.find('\n'), room);
    line_ += bytes.substr(0, end);
    const bool ended = end < bytes.size() && bytes[end] == '\n';
    bytes.remove_prefix(std::min(bytes.size(), end + (ended ? 1 : 0)));
    if (ended || line_.size() == kMaxLineBytes) end_line();
  }
  if (shown_ && !ready_.empty()) shown_->write(ready_);
  ready_.clear();
}

void LineStream::finish() {
  if (!line_.empty()) end_line();
  feed({});
}

void LineStream::end_line() {
  if (shown_) ready_ += prefix_ + line_ + '\n';
  tail_.push_back(std::move(line_));
  if (tail_.size() > kTailLines) tail_.pop_front();
  line_.clear();
}

}  // namespace tessera::launch
