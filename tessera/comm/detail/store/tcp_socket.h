#pragma once
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

// TCP sockets of the store's server and clients.
namespace tessera::comm::store {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;
inline constexpr Deadline kNoDeadline = Deadline::max();
// As in c10d: a time-out of 0 means no limit. A negative one is over at once.
Deadline deadline_after(std::chrono::milliseconds timeout);
// For poll() and epoll_wait(): rounded up; -1 is without limit.
int milliseconds_until(Deadline deadline);

// Owns a file descriptor.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

struct SocketAddress {
  std::string host;
  int64_t port = 0;
};
std::string to_text(const SocketAddress& address);  // "127.0.0.1:29500", "[::1]:29500"

// A listening socket on the first address of the host that can be bound, IPv4 first. On that address only. Port 0: a
// free one. Throws UsageError if the host has no address, CommError if the port is in use.
Descriptor listen_on(const SocketAddress& address);
// The numeric address of a listening socket. Throws UsageError if `fd` is not one.
SocketAddress listening_address(int fd);

// Tries each address of the host once. On failure the descriptor is -1 and `error` an errno.
struct Connected {
  Descriptor socket;
  int error = 0;
};
Connected connect_once(const SocketAddress& address, Deadline deadline);

// Options of a connection: non-blocking, without Nagle's delay, with keep-alive probes.
void prepare_stream(int fd);

// The result of send_all() and receive_until().
enum class Transfer { Done, Closed, TimedOut };
Transfer send_all(int fd, std::string_view bytes, Deadline deadline);
// Appends to `bytes` until it has `size` bytes.
Transfer receive_until(int fd, std::string& bytes, size_t size, Deadline deadline);

}  // namespace tessera::comm::store
