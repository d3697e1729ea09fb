#pragma once
#include "tessera/comm/detail/store/authentication.h"
#include "tessera/comm/detail/store/wire.h"

#include <optional>
#include <string>
#include <string_view>

namespace tessera::comm::store {

// The server's side of one connection, without its socket: bytes in, requests out, replies in, bytes out.
//
//   states:  handshake -> authenticated -> closed
//
// Any input is safe. Bytes that are not the next message of an authenticated client close the session.
class ServerSession {
 public:
  // The first output is the ServerHello.
  explicit ServerSession(const JobSecret& secret);

  void receive(std::string_view bytes) { input_ += bytes; }
  // The next complete request that has a valid tag. nullopt: more bytes are needed, or the session
  // is closed.
  std::optional<Message> next_request();
  // A reply that is larger than a frame becomes a refusal.
  void reply(const Message& message);

  // Bytes to send. They are to be sent also after the session is closed: they may hold the refusal.
  std::string_view output() const { return std::string_view(output_).substr(sent_); }
  void mark_sent(size_t bytes);

  bool is_authenticated() const { return keys_.has_value() && !closed_; }
  bool is_closed() const { return closed_; }

 private:
  void authenticate();

  const JobSecret& secret_;
  const std::string nonce_;
  std::optional<ConnectionKeys> keys_;  // set after the client's proof is verified
  std::string input_, output_;
  size_t sent_ = 0;  // bytes of output_
  bool closed_ = false;
};

}  // namespace tessera::comm::store
