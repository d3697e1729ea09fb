#include "tessera/comm/detail/local_rendezvous.h"

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
    const std::string text = c10::str("tessera-", geteuid(), "-", job);
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

// Abstract names have no permissions: any user may bind them or connect to them.
uid_t user_of_peer(int fd) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 ? peer.uid : static_cast<uid_t>(-1);
}
bool is_same_user(int fd) { return user_of_peer(fd) == geteuid(); }

bool readable_before(int fd, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
    pollfd waiting{fd, POLLIN, 0};
    const int n = poll(&waiting, 1, static_cast<int>(std::clamp<int64_t>(left, 0, 1 << 30)));
    if (n > 0) return true;
    if (n == 0 || errno != EINTR) return false;
  }
}

bool receive_all(int fd, void* to, size_t bytes, Clock::time_point deadline) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    if (!readable_before(fd, deadline)) return false;
    const ssize_t n = ::recv(fd, at, bytes, 0);
    if (n <= 0) return false;
    at += n;
    bytes -= static_cast<size_t>(n);
  }
  return true;
}

// port (8) | size of the secret (8) | secret
constexpr int64_t kMaxSecretBytes = 4096;

std::string to_message(const StoreTicket& ticket) {
  const int64_t numbers[2] = {ticket.port, static_cast<int64_t>(ticket.secret.size())};
  return std::string(reinterpret_cast<const char*>(numbers), sizeof numbers) + ticket.secret;
}

bool receive_ticket(int fd, StoreTicket& ticket, Clock::time_point deadline) {
  int64_t numbers[2] = {};
  if (!receive_all(fd, numbers, sizeof numbers, deadline)) return false;
  if (numbers[1] < 0 || numbers[1] > kMaxSecretBytes) return false;
  ticket = {numbers[0], std::string(static_cast<size_t>(numbers[1]), '\0')};
  return receive_all(fd, ticket.secret.data(), ticket.secret.size(), deadline);
}

}  // namespace

void send_store_ticket(const std::string& job, const StoreTicket& ticket, int64_t ranks,
                       std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const SocketName name(job);
  const Socket listener(new_socket());
  const std::string message = to_message(ticket);
  TESSERA_CHECK(::bind(listener.fd, name.get(), name.length) == 0 && ::listen(listener.fd, SOMAXCONN) == 0, CommError,
                "rank 0 cannot open the rendezvous socket of job '", job, "': ", std::strerror(errno),
                errno == EADDRINUSE ? "; another process has it. Give each job its own MASTER_PORT" : "");
  for (int64_t sent = 0; sent < ranks - 1;) {
    TESSERA_CHECK(readable_before(listener.fd, deadline), CommError, "rank 0 waited ",
                  static_cast<double>(timeout.count()) / 1000.0, " s for the other ranks of job '", job, "': ", sent,
                  " of ", ranks - 1,
                  " connected. Were all started, by the same user, with the same rendezvous address?");
    const int fd = ::accept4(listener.fd, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) continue;
    const Socket client(fd);
    // A message of this size fits into the buffer of a new socket, so send() does not block.
    if (is_same_user(fd) &&
        ::send(fd, message.data(), message.size(), MSG_NOSIGNAL | MSG_DONTWAIT) == static_cast<ssize_t>(message.size()))
      sent++;
  }
}

StoreTicket receive_store_ticket(const std::string& job, std::chrono::milliseconds timeout) {
  const auto deadline = Clock::now() + timeout;
  const SocketName name(job);
  std::string other_user;
  while (Clock::now() < deadline) {
    const Socket client(new_socket());
    StoreTicket ticket;
    if (::connect(client.fd, name.get(), name.length) == 0) {
      if (!is_same_user(client.fd))
        other_user = c10::str("; user ", user_of_peer(client.fd), " has the socket of that name");
      else if (receive_ticket(client.fd, ticket, deadline))
        return ticket;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));  // rank 0 does not listen yet
  }
  TESSERA_FAIL(CommError, "waited ", static_cast<double>(timeout.count()) / 1000.0, " s for rank 0 of job '", job,
               "' on this machine", other_user);
}

}  // namespace tessera::comm::detail
