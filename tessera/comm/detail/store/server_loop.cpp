#include "tessera/comm/detail/store/server_loop.h"

#include "tessera/base/error.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>

namespace tessera::comm::store {
namespace {

// Values of epoll_event::data that are not a connection.
constexpr uint64_t kListenerEvent = 0, kStopEvent = 1, kFirstConnection = 2;

void watch_descriptor(int epoll, int fd, uint64_t id, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = id;
  TESSERA_CHECK(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0, CommError,
                "the store cannot watch a socket: ", std::strerror(errno));
}

}  // namespace

ServerLoop::ServerLoop(int listening_socket, int stop_event, const JobSecret& secret,
                       std::chrono::milliseconds handshake_limit)
    : listening_socket_(listening_socket),
      stop_event_(stop_event),
      secret_(secret),
      handshake_limit_(handshake_limit),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      next_id_(kFirstConnection) {
  TESSERA_CHECK(epoll_.get() >= 0, CommError, "the store has no epoll descriptor: ", std::strerror(errno),
                "; raise the limit of open files");
  fcntl(listening_socket_, F_SETFL, fcntl(listening_socket_, F_GETFL) | O_NONBLOCK);
  watch_descriptor(epoll_.get(), listening_socket_, kListenerEvent, EPOLLIN);
  watch_descriptor(epoll_.get(), stop_event_, kStopEvent, EPOLLIN);
}

void ServerLoop::run() {
  std::array<epoll_event, 64> events;
  for (;;) {
    auto next = deadlines_.empty() ? kNoDeadline : deadlines_.begin()->first;
    if (!accepting_) next = std::min(next, Clock::now() + kAcceptPause);
    const int count = epoll_wait(epoll_.get(), events.data(), events.size(), milliseconds_until(next));
    set_accepting(true);
    for (int i = 0; i < count; i++) {
      const auto& event = events[static_cast<size_t>(i)];
      if (event.data.u64 == kStopEvent) return;
      if (event.data.u64 == kListenerEvent)
        accept_clients();
      else
        handle_events(event.data.u64, event.events);
    }
    expire(Clock::now());
    for (; !ready_.empty(); ready_.pop_front()) handle_events(ready_.front(), 0);
  }
}

// A few at a time, so that clients that are connected already get replies between the handshakes.
void ServerLoop::accept_clients() {
  for (int i = 0; i < 16; i++) {
    Descriptor socket(accept4(listening_socket_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.get() < 0) {
      const bool no_descriptors = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (no_descriptors && handshakes_.empty()) set_accepting(false);  // for kAcceptPause
      if (no_descriptors && !handshakes_.empty()) drop(*handshakes_.begin());
      return;
    }
    prepare_stream(socket.get());
    if (handshakes_.size() >= kMaxHandshakes) drop(*handshakes_.begin());
    const ConnectionId id = next_id_++;
    try {
      auto connection = std::make_unique<Connection>(std::move(socket), secret_);
      watch_descriptor(epoll_.get(), connection->socket.get(), id, 0);
      const auto at = connections_.emplace(id, std::move(connection)).first;
      handshakes_.insert(id);
      set_deadline(id, *at->second, Clock::now() + handshake_limit_);
    } catch (const std::exception&) {  // no memory, or no random bytes: this client is not served
      drop(id);
      return;
    }
    handle_events(id, 0);
  }
}

void ServerLoop::set_accepting(bool accepting) {
  if (accepting == accepting_) return;
  accepting_ = accepting;
  epoll_event event{};
  event.events = accepting ? uint32_t{EPOLLIN} : 0;
  event.data.u64 = kListenerEvent;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listening_socket_, &event);
}

void ServerLoop::handle_events(ConnectionId id, uint32_t events) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;  // an event before this one closed it
  Connection& connection = *found->second;
  bool alive = (events & (EPOLLERR | EPOLLHUP)) == 0 && !(connection.waiting && (events & EPOLLRDHUP) != 0);
  try {
    if (alive && (events & EPOLLIN) != 0) alive = read_available(connection);
    alive = alive && advance(id, connection);
  } catch (const std::exception&) {  // no memory for this client
    alive = false;
  }
  if (!alive) drop(id);
}

bool ServerLoop::read_available(Connection& connection) {
  std::array<char, 64 << 10> buffer;
  const ssize_t n = recv(connection.socket.get(), buffer.data(), buffer.size(), 0);
  if (n > 0) connection.session.receive({buffer.data(), static_cast<size_t>(n)});
  return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

// Executes requests and sends replies until the connection has to wait for its socket or for a key. False: close it.
bool ServerLoop::advance(ConnectionId id, Connection& connection) {
  for (;;) {
    if (!flush(connection)) return false;
    const bool has_output = !connection.session.output().empty();
    if (!has_output && connection.session.is_closed()) return false;
    if (has_output || connection.waiting) {
      set_events(id, connection, has_output ? EPOLLOUT : EPOLLRDHUP);
      return true;
    }
    auto request = connection.session.next_request();
    if (connection.session.is_authenticated() && handshakes_.erase(id) == 1) set_deadline(id, connection, kNoDeadline);
    if (request) {
      execute(id, connection, std::move(*request));
    } else if (connection.session.output().empty() && !connection.session.is_closed()) {
      set_events(id, connection, EPOLLIN);
      return true;
    }
  }
}

bool ServerLoop::flush(Connection& connection) {
  while (!connection.session.output().empty()) {
    const auto bytes = connection.session.output();
    const ssize_t n = send(connection.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno == EAGAIN;
    connection.session.mark_sent(static_cast<size_t>(n));
  }
  return true;
}

void ServerLoop::execute(ConnectionId id, Connection& connection, Message request) {
  const auto result = table_.execute(request);
  if (result.reply) {
    connection.session.reply(*result.reply);
    for (const auto& key : result.written_keys) retry_waiting(key);
    return;
  }
  set_deadline(id, connection, deadline_after(std::chrono::milliseconds(request.number)));
  connection.missing_key = result.missing_key;
  waiting_on_[result.missing_key].insert(id);
  connection.waiting = std::move(request);
}

void ServerLoop::retry_waiting(const std::string& written_key) {
  const auto waiting = waiting_on_.extract(written_key);
  if (waiting.empty()) return;
  for (const ConnectionId id : waiting.mapped()) {
    Connection& connection = *connections_.at(id);
    const auto result = table_.execute(*connection.waiting);
    if (result.reply) {
      finish_waiting(id, connection, *result.reply);
    } else {  // the same deadline, another key
      connection.missing_key = result.missing_key;
      waiting_on_[result.missing_key].insert(id);
    }
  }
}

// The reply is sent by run(): this function may be called while another connection advances.
void ServerLoop::finish_waiting(ConnectionId id, Connection& connection, const Message& reply) {
  stop_waiting(id, connection);
  connection.session.reply(reply);
  ready_.push_back(id);
}

void ServerLoop::stop_waiting(ConnectionId id, Connection& connection) {
  if (const auto found = waiting_on_.find(connection.missing_key); found != waiting_on_.end()) {
    found->second.erase(id);
    if (found->second.empty()) waiting_on_.erase(found);
  }
  connection.waiting.reset();
  set_deadline(id, connection, kNoDeadline);
}

void ServerLoop::expire(Deadline now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const ConnectionId id = deadlines_.begin()->second;
    Connection& connection = *connections_.at(id);
    if (!connection.waiting) {  // the handshake took too long
      drop(id);
      continue;
    }
    finish_waiting(id, connection, make_message(ReplyCode::TimedOut, {connection.missing_key}));
  }
}

void ServerLoop::set_deadline(ConnectionId id, Connection& connection, Deadline deadline) {
  deadlines_.erase({connection.deadline, id});
  connection.deadline = deadline;
  if (deadline != kNoDeadline) deadlines_.emplace(deadline, id);
}

void ServerLoop::set_events(ConnectionId id, Connection& connection, uint32_t events) {
  if (connection.events == events) return;
  epoll_event event{};
  event.events = connection.events = events;
  event.data.u64 = id;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, connection.socket.get(), &event);
}

void ServerLoop::drop(ConnectionId id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  stop_waiting(id, *found->second);
  handshakes_.erase(id);
  connections_.erase(found);  // closes the socket, which removes it from epoll
}

}  // namespace tessera::comm::store
