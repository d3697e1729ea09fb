#pragma once
#include "tessera/comm/detail/store/key_value_table.h"
#include "tessera/comm/detail/store/server_session.h"
#include "tessera/comm/detail/store/tcp_socket.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>

namespace tessera::comm::store {

// The event loop of StoreServer: sockets in, requests to the table, replies out. One thread, epoll.
//
// A connection is in one of three states; each has its own epoll events:
//   reading    EPOLLIN     handshake, or no request yet
//   writing    EPOLLOUT    the socket takes no more bytes for now; no further request is read
//   waiting    none        its request needs a key that does not exist; EPOLLRDHUP reports a client that has left
// So a client cannot make the server keep more than one request and one reply for it.
class ServerLoop {
 public:
  // A new client beyond this number replaces the one that is longest in its handshake. A client with the secret needs
  // one round trip, so connections that stay silent cannot keep it out.
  static constexpr size_t kMaxHandshakes = 256;

  // How long the server accepts nobody after the process has run out of descriptors.
  static constexpr std::chrono::milliseconds kAcceptPause{100};

  // Requires: all arguments outlive the loop.
  ServerLoop(int listening_socket, int stop_event, const JobSecret& secret, std::chrono::milliseconds handshake_limit);
  // Returns when stop_event is readable.
  void run();

 private:
  using ConnectionId = uint64_t;
  struct Connection {
    Connection(Descriptor accepted, const JobSecret& secret) : socket(std::move(accepted)), session(secret) {}
    Descriptor socket;
    ServerSession session;
    std::optional<Message> waiting;  // a Get or Wait
    std::string missing_key;         // the key that `waiting` needs first
    Deadline deadline = kNoDeadline;
    uint32_t events = 0;
  };

  void accept_clients();
  void set_accepting(bool accepting);
  void handle_events(ConnectionId id, uint32_t events);
  bool read_available(Connection& connection);
  bool advance(ConnectionId id, Connection& connection);
  bool flush(Connection& connection);
  void execute(ConnectionId id, Connection& connection, Message request);
  void retry_waiting(const std::string& written_key);
  void finish_waiting(ConnectionId id, Connection& connection, const Message& reply);
  void stop_waiting(ConnectionId id, Connection& connection);
  void expire(Deadline now);
  void set_deadline(ConnectionId id, Connection& connection, Deadline deadline);
  void set_events(ConnectionId id, Connection& connection, uint32_t events);
  void drop(ConnectionId id);

  const int listening_socket_, stop_event_;
  const JobSecret& secret_;
  const std::chrono::milliseconds handshake_limit_;
  const Descriptor epoll_;
  KeyValueTable table_;
  std::unordered_map<ConnectionId, std::unique_ptr<Connection>> connections_;
  std::unordered_map<std::string, std::set<ConnectionId>> waiting_on_;  // by Connection::missing_key
  std::set<std::pair<Deadline, ConnectionId>> deadlines_;
  std::set<ConnectionId> handshakes_;  // ids increase, so the first is the oldest
  std::deque<ConnectionId> ready_;     // have a reply to send after a wait
  ConnectionId next_id_;
  bool accepting_ = true;
};

}  // namespace tessera::comm::store
