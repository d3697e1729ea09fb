#pragma once
#include "tessera/comm/detail/store/authenticated_store.h"

#include <memory>
#include <random>
#include <string>

// What the tests of the authenticated store share.
namespace tessera::comm::store {

using namespace std::chrono_literals;

inline std::string random_text(std::mt19937& random, size_t max_size) {
  std::string text(random() % (max_size + 1), '\0');
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

inline std::vector<uint8_t> value_of(const std::string& text) { return {text.begin(), text.end()}; }

// A server on a free loopback port, and clients that have its secret.
struct TestServer {
  explicit TestServer(const std::string& host = "127.0.0.1",
                      std::chrono::milliseconds handshake_limit = StoreServer::kHandshakeLimit)
      : server(std::make_shared<StoreServer>(SocketAddress{host, 0}, secret, handshake_limit)),
        address(server->address()) {}

  c10::intrusive_ptr<AuthenticatedStore> client(std::chrono::milliseconds timeout = 20s) const {
    return c10::make_intrusive<AuthenticatedStore>(AuthenticatedStoreOptions{address, secret, timeout});
  }

  const std::string secret = make_job_secret();
  std::shared_ptr<StoreServer> server;
  const SocketAddress address;
};

// An end of a connection that sends what the test wants.
struct RawConnection {
  explicit RawConnection(const SocketAddress& to) : socket(connect_once(to, deadline_after(5s)).socket) {}
  explicit RawConnection(Descriptor accepted) : socket(std::move(accepted)) { prepare_stream(socket.get()); }

  void send(std::string_view bytes) { send_all(socket.get(), bytes, deadline_after(5s)); }
  std::string receive(size_t size) {  // fewer bytes if the other end closes or sends nothing for 5 s
    std::string bytes;
    if (receive_until(socket.get(), bytes, size, deadline_after(5s)) != Transfer::Done) return "";
    return bytes;
  }
  bool is_closed_by_peer() {
    std::string bytes;
    return receive_until(socket.get(), bytes, 1, deadline_after(5s)) == Transfer::Closed;
  }

  Descriptor socket;
};

}  // namespace tessera::comm::store
