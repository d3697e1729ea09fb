#include "tessera/cli/loopback_server.h"

#include "tessera/base/detail/system_error.h"
#include "tessera/base/error.h"

#include <arpa/inet.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace tessera::cli {
namespace {

constexpr size_t kLongestRequest = 16384;
constexpr int kPatienceMs = 2000;  // with a client that sends or reads nothing

bool wait_for(int fd, short what) {
  pollfd waiting{fd, what, 0};
  return poll(&waiting, 1, kPatienceMs) == 1;
}

// The head of the request; "" if the client does not complete it.
std::string read_head(int connection) {
  std::string head;
  char buffer[4096];
  while (head.find("\r\n\r\n") == std::string::npos) {
    if (head.size() > kLongestRequest || !wait_for(connection, POLLIN)) return "";
    const auto got = recv(connection, buffer, sizeof buffer, 0);
    if (got <= 0) return "";
    head.append(buffer, static_cast<size_t>(got));
  }
  return head;
}

void send_all(int connection, std::string_view text) {
  while (!text.empty() && wait_for(connection, POLLOUT)) {
    const auto sent = send(connection, text.data(), text.size(), MSG_NOSIGNAL);
    if (sent <= 0) return;
    text.remove_prefix(static_cast<size_t>(sent));
  }
}

std::string header_of(const std::string& head, std::string_view name) {  // `name` in lower case
  for (size_t line = head.find("\r\n"); line != std::string::npos; line = head.find("\r\n", line + 2)) {
    const size_t begin = line + 2, colon = head.find(':', begin), end = head.find("\r\n", begin);
    if (colon == std::string::npos || end == std::string::npos || colon > end) continue;
    std::string key = head.substr(begin, colon - begin);
    for (char& c : key) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    if (key != name) continue;
    const size_t value = head.find_first_not_of(' ', colon + 1);
    return head.substr(value, end - value);
  }
  return "";
}

}  // namespace

LoopbackServer::LoopbackServer(int64_t port) {
  socket_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  TESSERA_CHECK_ERRNO(socket_ >= 0, "cannot create a socket");
  const int yes = 1;
  setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  at.sin_port = htons(static_cast<uint16_t>(port));
  socklen_t length = sizeof at;
  const bool bound = bind(socket_, reinterpret_cast<sockaddr*>(&at), length) == 0 && listen(socket_, 16) == 0;
  const int error = errno;
  if (!bound) close(socket_);
  TESSERA_CHECK(bound || (error != EADDRINUSE && error != EACCES), UsageError, "port ", port,
                error == EACCES ? " is not allowed for this user" : " is in use",
                "; choose another --port, or 0 for a free one");
  errno = error;
  TESSERA_CHECK_ERRNO(bound, "cannot listen at 127.0.0.1:", port);
  getsockname(socket_, reinterpret_cast<sockaddr*>(&at), &length);
  port_ = ntohs(at.sin_port);
  stop_ = eventfd(0, EFD_CLOEXEC);
}

LoopbackServer::~LoopbackServer() {
  close(socket_);
  close(stop_);
}

std::string LoopbackServer::address() const { return c10::str("http://127.0.0.1:", port_, "/"); }

void LoopbackServer::stop() {
  const uint64_t one = 1;
  (void)!write(stop_, &one, sizeof one);
}

void LoopbackServer::run(const Handler& handler) {
  for (;;) {
    pollfd waiting[] = {{socket_, POLLIN, 0}, {stop_, POLLIN, 0}};
    if (poll(waiting, 2, -1) < 0 && errno != EINTR) return;
    if (waiting[1].revents) return;
    if (!waiting[0].revents) continue;
    const int connection = accept4(socket_, nullptr, nullptr, SOCK_CLOEXEC);
    if (connection < 0) continue;
    answer(connection, handler);
    close(connection);
  }
}

void LoopbackServer::answer(int connection, const Handler& handler) const {
  const auto head = read_head(connection);
  if (head.empty()) return;
  HttpAnswer reply;
  const auto host = header_of(head, "host");
  const auto port = std::to_string(port_);
  if (host != "127.0.0.1:" + port && host != "localhost:" + port) {
    reply = {403, "text/plain", "this server answers only at " + address() + "\n"};
  } else if (!head.starts_with("GET /")) {
    reply = {405, "text/plain", "only GET is answered\n"};
  } else {
    try {
      reply = handler(std::string_view(head).substr(4, head.find_first_of(" ?\r", 4) - 4));
    } catch (const std::exception& error) {
      reply = {500, "text/plain", std::string(error.what()) + "\n"};
    }
  }
  send_all(connection,
           c10::str("HTTP/1.1 ", reply.status, " \r\nContent-Type: ", reply.type,
                    "; charset=utf-8\r\nContent-Length: ", reply.body.size(),
                    "\r\nCache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n", "Connection: close\r\n\r\n"));
  send_all(connection, reply.body);
}

}  // namespace tessera::cli
