#include "tessera/comm/detail/store/server_session.h"

#include <c10/util/StringUtil.h>

namespace tessera::comm::store {

ServerSession::ServerSession(const JobSecret& secret)
    : secret_(secret), nonce_(random_bytes(kNonceBytes)), output_(std::string(kMagic) + nonce_) {}

void ServerSession::authenticate() {
  const Hello hello = parse_client_hello(input_);
  if (hello.state == ParseState::Incomplete) return;
  closed_ = true;
  if (hello.state == ParseState::Invalid) return;
  ConnectionKeys keys(secret_, nonce_, hello.nonce);
  if (!equal_in_constant_time(view(keys.client_proof), hello.proof)) {
    output_ += 'R' + std::string(kDigestBytes, '\0');
    return;
  }
  closed_ = false;
  output_ += 'A';
  output_ += view(keys.server_proof);
  keys_ = keys;
  input_.erase(0, kClientHelloBytes);
}

std::optional<Message> ServerSession::next_request() {
  if (!closed_ && !keys_) authenticate();
  if (!is_authenticated()) return std::nullopt;
  const Frame frame = parse_frame(input_);
  if (frame.state == ParseState::Incomplete) return std::nullopt;
  closed_ = true;
  if (frame.state == ParseState::Invalid) return std::nullopt;
  if (!equal_in_constant_time(view(keys_->client_to_server.next_tag(frame.body)), frame.tag)) return std::nullopt;
  auto request = parse_body(frame.body);
  if (!request || !is_request(*request)) return std::nullopt;
  closed_ = false;
  input_.erase(0, frame.size);
  return request;
}

void ServerSession::reply(const Message& message) {
  const size_t bytes = body_bytes(message);
  if (bytes > kMaxBodyBytes)
    return reply(make_message(ReplyCode::Refused, {c10::str("the reply has ", bytes, " bytes; at most ", kMaxBodyBytes,
                                                            " are allowed. Ask for fewer keys at a time")}));
  output_ += seal_frame(encode_body(message), keys_->server_to_client);
}

void ServerSession::mark_sent(size_t bytes) {
  sent_ += bytes;
  if (sent_ < output_.size()) return;
  output_.clear();
  sent_ = 0;
}

}  // namespace tessera::comm::store
