#include "tessera/comm/detail/listen.h"

#include "tessera/base/error.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

namespace tessera::comm::detail {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const char* host, int64_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  TESSERA_CHECK(error == 0, UsageError, "'", host, "' cannot be resolved: ", gai_strerror(error));
  return {found, freeaddrinfo};
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET)
    return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
  return address->sa_family == AF_INET6 &&
         IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

// Returns 0 or errno. Waits at most one second for a host that does not answer.
int try_connect(const addrinfo& to) {
  const int fd = ::socket(to.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  int error = ::connect(fd, to.ai_addr, to.ai_addrlen) == 0 ? 0 : errno;
  if (error == EINPROGRESS) {
    pollfd waiting{fd, POLLOUT, 0};
    socklen_t length = sizeof error;
    if (poll(&waiting, 1, 1000) != 1 || getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length) != 0) error = ETIMEDOUT;
  }
  ::close(fd);
  return error;
}

}  // namespace

void wait_for_listener(const std::string& host, int64_t port, std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const auto addresses = resolve(host.c_str(), port);
    int error = 0;
    for (const auto* a = addresses.get(); a; a = a->ai_next) {
      error = try_connect(*a);
      if (error == 0) return;
    }
    TESSERA_CHECK(Clock::now() < deadline, CommError, "no process listens at ", host, ":", port, " (",
                  std::strerror(error), ") after ", timeout.count() / 1000,
                  " s; is rank 0 (or the launcher of node 0) running, and is this its address?");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

bool is_loopback(const std::string& host) {
  const auto addresses = resolve(host.c_str(), 0);
  for (const auto* a = addresses.get(); a; a = a->ai_next)
    if (!is_loopback(a->ai_addr)) return false;
  return true;
}

}  // namespace tessera::comm::detail
