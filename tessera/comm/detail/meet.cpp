#include "tessera/comm/detail/meet.h"

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
  ~Socket() { close(fd); }
  Socket(const Socket&) = delete;
  const int fd;
};

struct Name {
  sockaddr_un address{};
  socklen_t length = 0;
  explicit Name(const std::string& job) {
    const std::string text = c10::str("tessera-", getuid(), "-", job);
    address.sun_family = AF_UNIX;  // and sun_path[0] stays 0: abstract
    const size_t size = std::min(text.size(), sizeof address.sun_path - 1);
    std::memcpy(address.sun_path + 1, text.data(), size);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + size);
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

int new_socket() {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TESSERA_CHECK(fd >= 0, CommError, "no socket to meet the other ranks: ", std::strerror(errno));
  return fd;
}

// Abstract names have no permissions: anybody may bind or connect to them.
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

void tell_port(const std::string& job, uint16_t port, int64_t ranks, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const Name name(job);
  const Socket door(new_socket());
  TESSERA_CHECK(bind(door.fd, name.get(), name.length) == 0 && listen(door.fd, SOMAXCONN) == 0, CommError,
                "rank 0 cannot open the meeting place of job '", job, "': ", std::strerror(errno),
                errno == EADDRINUSE ? "; another process says it is rank 0 of this job" : "");
  for (int64_t told = 0; told < ranks - 1;) {
    TESSERA_CHECK(readable_before(door.fd, deadline), CommError, "rank 0 waited ", timeout.count() / 1000,
                  " s for the other ranks of job '", job, "': ", told, " of ", ranks - 1, " came");
    const int fd = accept4(door.fd, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    const Socket visitor(fd);
    if (is_same_user(fd) && send(fd, &port, sizeof port, MSG_NOSIGNAL) == sizeof port) told++;
  }
}

uint16_t ask_port(const std::string& job, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const Name name(job);
  while (Clock::now() < deadline) {
    const Socket visitor(new_socket());
    uint16_t port = 0;
    if (connect(visitor.fd, name.get(), name.length) == 0 && is_same_user(visitor.fd) &&
        readable_before(visitor.fd, deadline) && recv(visitor.fd, &port, sizeof port, 0) == sizeof port)
      return port;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // rank 0 is not there yet; nothing can tell us when
  }
  TESSERA_FAIL(CommError, "waited ", timeout.count() / 1000, " s for rank 0 of job '", job, "' on this machine");
}

}  // namespace tessera::comm::detail
