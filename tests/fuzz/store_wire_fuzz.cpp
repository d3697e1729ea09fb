// What a stranger can send to the store: hello, frame, and the message in a frame. Encoding and parsing of a message
// give the same bytes.
#include "tessera/comm/detail/store/wire.h"

#include "fuzz_targets.h"

namespace tessera::fuzz {

void fuzz_store_wire(std::string_view input) {
  namespace store = comm::store;
  const auto inside = [&](std::string_view part) {
    require(part.empty() || (part.data() >= input.data() && part.data() + part.size() <= input.data() + input.size()),
            "a part is not inside of the bytes");
  };
  for (const auto& hello : {store::parse_server_hello(input), store::parse_client_hello(input)})
    inside(hello.nonce), inside(hello.proof);
  const auto frame = store::parse_frame(input);
  inside(frame.body), inside(frame.tag);
  const bool complete = frame.state == store::ParseState::Complete;
  for (const auto body : {input, complete ? frame.body : std::string_view()}) {
    const auto message = store::parse_body(body);
    if (!message) continue;
    require(store::encode_body(*message) == body, "the message is encoded as other bytes");
    require(store::body_bytes(*message) == body.size(), "the message has another size");
    store::is_request(*message);
    store::is_reply(*message);
  }
}

}  // namespace tessera::fuzz
