#pragma once
#include "tessera/comm/detail/store/authentication.h"
#include "tessera/comm/detail/store/tcp_socket.h"
#include "tessera/comm/detail/store/wire.h"

#include <memory>
#include <optional>
#include <string>

namespace tessera::comm::store {

// One authenticated connection of a client. One thread uses it at a time.
class ClientConnection {
 public:
  // Connects, proves to the server that this process has the secret, and checks that the server has it.
  // `purpose` describes the request that needs the connection, for errors: "get of key 'x'". An empty one is the first
  // connection of a client: it tries again until the deadline while nobody listens there.
  // Throws UsageError if the server refuses the secret, CommError if there is no server that has it.
  static std::unique_ptr<ClientConnection> open(const SocketAddress& server, const JobSecret& secret, Deadline deadline,
                                                const std::string& purpose = "");

  // Sends a request and returns its reply.
  // Throws CommError if the connection fails, or if no reply comes before the deadline. The object is unusable then.
  Message call(const Message& request, Deadline deadline, const std::string& purpose);

 private:
  ClientConnection(const SocketAddress& server, Descriptor socket) : server_(server), socket_(std::move(socket)) {}
  // Empty: authenticated. Otherwise: why another try can help.
  std::string authenticate(const JobSecret& secret, Deadline deadline);

  SocketAddress server_;
  Descriptor socket_;
  std::optional<ConnectionKeys> keys_;
};

}  // namespace tessera::comm::store
