#pragma once
#include "tessera/comm/detail/store/authentication.h"
#include "tessera/comm/detail/store/tcp_socket.h"

#include <sys/types.h>

#include <chrono>
#include <memory>
#include <string_view>
#include <thread>

namespace tessera::comm::store {

// The server of an authenticated store. One thread serves all clients; a client that waits for a key does not delay the
// others. A process that does not prove that it has the secret of the job gets no reply to any request.
//
// Example:
//   StoreServer server({"127.0.0.1", 0}, secret);                      // port 0: a free one
//   AuthenticatedStore store({server.address(), secret});
class StoreServer {
 public:
  // A client that has not authenticated after this time is disconnected.
  static constexpr std::chrono::milliseconds kHandshakeLimit{5000};

  // Listens on this address only. Throws CommError if the port is in use.
  StoreServer(const SocketAddress& address, std::string_view secret,
              std::chrono::milliseconds handshake_limit = kHandshakeLimit);
  // Takes ownership of a socket that listens already.
  StoreServer(Descriptor listening_socket, std::string_view secret,
              std::chrono::milliseconds handshake_limit = kHandshakeLimit);
  // Closes all connections; clients that wait get a CommError at once. In a child after fork(), the server of the
  // parent continues.
  ~StoreServer();
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;

  const SocketAddress& address() const { return address_; }  // numeric, with the port that was found

 private:
  const JobSecret secret_;
  const Descriptor listening_socket_;
  const SocketAddress address_;
  const Descriptor stop_event_;
  const pid_t owner_;  // the process of the thread
  std::unique_ptr<std::thread> thread_;
};

}  // namespace tessera::comm::store
