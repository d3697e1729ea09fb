#include "tessera/comm/detail/store/tcp_socket.h"

#include "tessera/base/error.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace tessera::comm::store {
namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList addresses_of(const SocketAddress& address) {
  TESSERA_CHECK(address.port >= 0 && address.port < 65536, UsageError, "port ", address.port, " for the store on ",
                address.host, "; ports are 1 to 65535");
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.host.c_str(), std::to_string(address.port).c_str(), &hints, &found);
  TESSERA_CHECK(error == 0, UsageError, "the host '", address.host,
                "' of the store has no address: ", gai_strerror(error), "; check its name (MASTER_ADDR, --rdzv)");
  return {found, freeaddrinfo};
}

void set_option(int fd, int level, int option, int value) { setsockopt(fd, level, option, &value, sizeof value); }

// True if the events came before the deadline. The caller finds errors in the next send() or recv().
bool poll_until(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd waiting{fd, events, 0};
    const int n = poll(&waiting, 1, milliseconds_until(deadline));
    if (n > 0) return true;
    if (n == 0 && Clock::now() >= deadline) return false;
    if (n < 0 && errno != EINTR) return true;
  }
}

// After a send() or recv() that returned -1: waits until it is worth another try.
Transfer wait_to_retry(int fd, short events, Deadline deadline) {
  if (errno == EINTR) return Transfer::Done;
  if (errno != EAGAIN && errno != EWOULDBLOCK) return Transfer::Closed;
  return poll_until(fd, events, deadline) ? Transfer::Done : Transfer::TimedOut;
}

// A connection to a local port where nobody listens can succeed: the kernel may choose that port for this end too.
bool is_connected_to_itself(int fd) {
  sockaddr_storage here{}, there{};
  socklen_t here_length = sizeof here, there_length = sizeof there;
  getsockname(fd, reinterpret_cast<sockaddr*>(&here), &here_length);
  getpeername(fd, reinterpret_cast<sockaddr*>(&there), &there_length);
  return here_length == there_length && std::memcmp(&here, &there, here_length) == 0;
}

}  // namespace

Deadline deadline_after(std::chrono::milliseconds timeout) {
  constexpr std::chrono::hours kLongest(24 * 365 * 10);  // more would overflow the clock's nanoseconds
  if (timeout.count() == 0 || timeout > kLongest) return kNoDeadline;
  return Clock::now() + std::max(timeout, std::chrono::milliseconds(0));
}

int milliseconds_until(Deadline deadline) {
  if (deadline == kNoDeadline) return -1;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30));
}

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

std::string to_text(const SocketAddress& address) {
  const bool is_v6 = address.host.find(':') != std::string::npos;
  return is_v6 ? c10::str('[', address.host, "]:", address.port) : c10::str(address.host, ':', address.port);
}

Descriptor listen_on(const SocketAddress& address) {
  const auto addresses = addresses_of(address);
  int error = 0;
  for (const int family : {AF_INET, AF_INET6})
    for (const auto* a = addresses.get(); a; a = a->ai_next) {
      if (a->ai_family != family) continue;
      Descriptor fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      if (fd.get() >= 0) set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1);  // ignores connections of the last server
      if (fd.get() >= 0 && bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0 && listen(fd.get(), SOMAXCONN) == 0)
        return fd;
      if (error != EADDRINUSE) error = errno;
    }
  TESSERA_FAIL(CommError, "the store cannot listen on ", to_text(address), ": ", std::strerror(error),
               error == EADDRINUSE      ? "; another job may use that port: choose another one (MASTER_PORT, --rdzv)"
               : error == EADDRNOTAVAIL ? "; the address belongs to another host: start the server there"
                                        : "");
}

SocketAddress listening_address(int fd) {
  int is_listening = 0;
  socklen_t length = sizeof is_listening;
  const bool known = getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &is_listening, &length) == 0;
  TESSERA_CHECK(known && is_listening, UsageError, "descriptor ", fd,
                " is not a listening socket; call bind() and listen() before StoreServer takes it");
  sockaddr_storage bound{};
  length = sizeof bound;
  char host[NI_MAXHOST] = "?", port[NI_MAXSERV] = "0";
  auto* const address = reinterpret_cast<sockaddr*>(&bound);
  if (getsockname(fd, address, &length) == 0)
    getnameinfo(address, length, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV);
  return {host, std::atoll(port)};
}

Connected connect_once(const SocketAddress& address, Deadline deadline) {
  const auto addresses = addresses_of(address);
  int error = EADDRNOTAVAIL;
  for (const auto* a = addresses.get(); a; a = a->ai_next) {
    Descriptor fd(socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    error = fd.get() >= 0 && connect(fd.get(), a->ai_addr, a->ai_addrlen) == 0 ? 0 : errno;
    socklen_t length = sizeof error;
    if (fd.get() >= 0 && error == EINPROGRESS)
      if (!poll_until(fd.get(), POLLOUT, deadline) || getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0)
        error = ETIMEDOUT;
    if (error == 0 && is_connected_to_itself(fd.get())) error = ECONNREFUSED;
    if (error != 0) continue;
    prepare_stream(fd.get());
    return {std::move(fd), 0};
  }
  return {Descriptor(), error};
}

void prepare_stream(int fd) {
  fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that has lost its power or its network is found after 30 + 3 * 10 seconds. The default is two hours.
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 30);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 10);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 3);
}

Transfer send_all(int fd, std::string_view bytes, Deadline deadline) {
  while (!bytes.empty()) {
    const ssize_t n = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n >= 0) {
      bytes.remove_prefix(static_cast<size_t>(n));
    } else if (const auto retry = wait_to_retry(fd, POLLOUT, deadline); retry != Transfer::Done) {
      return retry;
    }
  }
  return Transfer::Done;
}

Transfer receive_until(int fd, std::string& bytes, size_t size, Deadline deadline) {
  constexpr size_t kGrowth = size_t{1} << 20;  // memory grows with the bytes that arrive, not with the announced size
  for (size_t received = bytes.size(); received < size;) {
    bytes.resize(std::min(size, received + kGrowth));
    const ssize_t n = recv(fd, bytes.data() + received, bytes.size() - received, 0);
    if (n == 0) return Transfer::Closed;
    if (n > 0) {
      received += static_cast<size_t>(n);
    } else if (const auto retry = wait_to_retry(fd, POLLIN, deadline); retry != Transfer::Done) {
      return retry;
    }
  }
  return Transfer::Done;
}

}  // namespace tessera::comm::store
