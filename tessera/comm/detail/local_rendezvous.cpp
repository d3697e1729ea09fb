#include "tessera/comm/detail/port_exchange.h"

#include "tessera/base/error.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <thread>

namespace tessera::comm::detail {
namespace {

using Clock = std::chrono::steady_clock;

struct Socket {
  explicit Socket(int fd) : fd(fd) {}
  ~Socket() { ::close(fd); }
  Socket(const Socket&) = delete;
  const int fd;
};

struct SocketName {
  sockaddr_un address{};
  socklen_t length = 0;
  explicit SocketName(const std::string& job) {
    const std::string text = c10::str("tessera-", getuid(), "-", job);
    address.sun_family = AF_UNIX;  // sun_path[0] stays 0: an abstract name
    const size_t size = std::min(text.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path + 1, text.data(), size);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

int new_socket() {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TESSERA_CHECK(fd >= 0, CommError, "cannot create a Unix socket: ", std::strerror(errno));
  return fd;
}

// Abstract names have no permissions: any user may bind or connect to them.
bool is_same_user(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == getuid();
}

bool readable_before(int fd, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{fd, POLLIN, 0};
    const int n = poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30)));
    if (n > 0) return true;
    if (n == 0 || errno != EINTR) return false;
  }
}

}  // namespace

void publish_port(const std::string& job, uint16_t port, int64_t ranks, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const SocketName name(job);
  const Socket listener(new_socket());
  TESSERA_CHECK(::bind(listener.fd, name.get(), name.length) == 0 && ::listen(listener.fd, SOMAXCONN) == 0, CommError,
                "rank 0 cannot open the rendezvous socket of job '", job, "': ", std::strerror(errno),
                errno == EADDRINUSE ? "; another process is rank 0 of this job" : "");
  for (int64_t sent = 0; sent < ranks - 1;) {
    TESSERA_CHECK(readable_before(listener.fd, deadline), CommError, "rank 0 waited ", timeout.count() / 1000,
                  " s for the other ranks of job '", job, "': ", sent, " of ", ranks - 1, " connected");
    const int fd = ::accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    const Socket client(fd);
    if (is_same_user(fd) && ::send(fd, &port, sizeof port, MSG_NOSIGNAL) == sizeof port) sent++;
  }
}

uint16_t receive_port(const std::string& job, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const SocketName name(job);
  while (Clock::now() < deadline) {
    const Socket client(new_socket());
    uint16_t port = 0;
    if (::connect(client.fd, name.get(), name.length) == 0 && is_same_user(client.fd) &&
        readable_before(client.fd, deadline) && ::recv(client.fd, &port, sizeof port, 0) == sizeof port)
      return port;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // rank 0 does not listen yet
  }
  TESSERA_FAIL(CommError, "waited ", timeout.count() / 1000, " s for rank 0 of job '", job, "' on this machine");
}

}  // namespace tessera::comm::detail
