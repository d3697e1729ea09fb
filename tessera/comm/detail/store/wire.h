#pragma once
#include "tessera/comm/detail/store/sha256.h"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Wire format of the authenticated store, version 1. Numbers are little endian; "x (n)" is x in n bytes; a | b is a,
// then b. `secret` is the secret of the job. It never travels.
//
// Handshake, fixed sizes:
//   server -> client  ServerHello    magic (8) | server nonce (32)
//   client -> server  ClientHello    magic (8) | client nonce (32) | HMAC(secret, "... client proof" | nonces) (32)
//   server -> client  ServerVerdict  'A' | HMAC(secret, "... server proof" | nonces) (32)   accepted
//                                    'R' | zeros (32)                                       refused; the server closes
// Both proofs cover both nonces and a label for the role. So a proof is of use in one connection and one direction
// only.
//
// Then frames in both directions:
//   body size (4) | body | tag (32)
//   tag = HMAC(direction key, frame number (8) | body size (4) | body)
//   direction key = HMAC(secret, "... client to server" or "... server to client" | nonces)
// Frames are numbered from 0 per direction; the number is not sent. A frame that is repeated, left out, reordered or
// changed has a wrong tag. The receiver of a wrong tag closes the connection. Bodies are not encrypted.
//
// Body of a request (code = RequestCode) and of a reply (code = ReplyCode):
//   code (1) | number (8) | field count (4) | per field: size (4) | bytes
// The client sends one request and waits for its reply.
namespace tessera::comm::store {

inline constexpr std::string_view kMagic = "TSRSTOR1";
inline constexpr size_t kNonceBytes = 32;
inline constexpr size_t kServerHelloBytes = kMagic.size() + kNonceBytes;
inline constexpr size_t kClientHelloBytes = kMagic.size() + kNonceBytes + kDigestBytes;
inline constexpr size_t kVerdictBytes = 1 + kDigestBytes;
inline constexpr size_t kMaxBodyBytes = size_t{64} << 20;

enum class RequestCode : uint8_t {  //  number            fields                   reply: number   reply: fields
  Set = 1,                          //                    key, value, key, ...
  CompareSet,                       //                    key, expected, desired                   value
  Get,                              //  time-out in ms    keys                                     values
  Add,                              //  summand           key                      sum
  DeleteKey,                        //                    key                      1: was there
  Check,                            //                    keys                     1: all exist
  Wait,                             //  time-out in ms    keys
  NumKeys,                          //                                             keys in the store
  Append,                           //                    key, value
};
// Time-out: 0 waits without limit, a negative one is over at once.

enum class ReplyCode : uint8_t {
  Done = 1,
  TimedOut,  // fields: one key that does not exist
  Refused,   // fields: why the request cannot be executed
};

struct Message {
  uint8_t code = 0;
  int64_t number = 0;
  std::vector<std::string> fields = {};
  bool operator==(const Message&) const = default;
};
Message make_message(RequestCode code, std::vector<std::string> fields = {}, int64_t number = 0);
Message make_message(ReplyCode code, std::vector<std::string> fields = {}, int64_t number = 0);

// The functions below read `bytes` only, never past its end, for any content.

std::string encode_body(const Message& message);
size_t body_bytes(const Message& message);  // the size of encode_body(message)
// nullopt: the bytes are not exactly one message.
std::optional<Message> parse_body(std::string_view bytes);
// True if the code is a RequestCode with an allowed number of fields.
bool is_request(const Message& message);
bool is_reply(const Message& message);

std::string encode_u32(uint32_t value);
std::string encode_u64(uint64_t value);

enum class ParseState { Incomplete, Invalid, Complete };

// The frame at the start of `bytes`. The views point into `bytes`.
struct Frame {
  ParseState state = ParseState::Incomplete;
  std::string_view body = {}, tag = {};
  size_t size = 0;  // of all three parts; if Incomplete: the bytes that are needed at least
};
Frame parse_frame(std::string_view bytes);  // Invalid: the body is larger than kMaxBodyBytes

// A hello of either side at the start of `bytes`. Invalid as soon as a byte differs from the magic.
struct Hello {
  ParseState state = ParseState::Incomplete;
  std::string_view nonce = {}, proof = {};  // `proof` is empty in a ServerHello
};
Hello parse_server_hello(std::string_view bytes);
Hello parse_client_hello(std::string_view bytes);

}  // namespace tessera::comm::store
