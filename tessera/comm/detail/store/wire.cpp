#include "tessera/comm/detail/store/wire.h"

#include <algorithm>
#include <limits>

namespace tessera::comm::store {
namespace {

constexpr size_t kAnyCount = std::numeric_limits<size_t>::max();

struct RequestShape {
  RequestCode code;
  size_t min_fields, max_fields;
  size_t fields_per_key;  // the number of fields is a multiple of it
};

constexpr RequestShape kRequestShapes[] = {
    {RequestCode::Set, 0, kAnyCount, 2},  {RequestCode::CompareSet, 3, 3, 3}, {RequestCode::Get, 0, kAnyCount, 1},
    {RequestCode::Add, 1, 1, 1},          {RequestCode::DeleteKey, 1, 1, 1},  {RequestCode::Check, 0, kAnyCount, 1},
    {RequestCode::Wait, 0, kAnyCount, 1}, {RequestCode::NumKeys, 0, 0, 1},    {RequestCode::Append, 2, 2, 2},
};

std::string little_endian(uint64_t value, size_t size) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; i++) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}

// Takes numbers and byte strings from the front of `bytes`. After the first that is too short, ok() is false and the
// results are empty.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  std::string_view take(size_t size) {
    if (size > bytes_.size()) ok_ = false;
    if (!ok_) return {};
    const auto taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }

  uint64_t take_number(size_t size) {
    uint64_t value = 0;
    const auto taken = take(size);
    for (size_t i = 0; i < taken.size(); i++) value |= uint64_t{static_cast<uint8_t>(taken[i])} << (8 * i);
    return value;
  }

  bool ok() const { return ok_; }
  size_t left() const { return bytes_.size(); }

 private:
  std::string_view bytes_;
  bool ok_ = true;
};

Hello parse_hello(std::string_view bytes, size_t proof_bytes) {
  ByteReader reader(bytes);
  const size_t known = std::min(bytes.size(), kMagic.size());
  if (bytes.substr(0, known) != kMagic.substr(0, known)) return {.state = ParseState::Invalid};
  reader.take(kMagic.size());
  const auto nonce = reader.take(kNonceBytes), proof = reader.take(proof_bytes);
  if (!reader.ok()) return {};
  return {ParseState::Complete, nonce, proof};
}

}  // namespace

Message make_message(RequestCode code, std::vector<std::string> fields, int64_t number) {
  return {static_cast<uint8_t>(code), number, std::move(fields)};
}

Message make_message(ReplyCode code, std::vector<std::string> fields, int64_t number) {
  return {static_cast<uint8_t>(code), number, std::move(fields)};
}

std::string encode_u32(uint32_t value) { return little_endian(value, 4); }
std::string encode_u64(uint64_t value) { return little_endian(value, 8); }

size_t body_bytes(const Message& message) {
  size_t bytes = 1 + 8 + 4;
  for (const auto& field : message.fields) bytes += 4 + field.size();
  return bytes;
}

std::string encode_body(const Message& message) {
  std::string bytes;
  bytes.reserve(body_bytes(message));
  bytes += static_cast<char>(message.code);
  bytes += encode_u64(static_cast<uint64_t>(message.number));
  bytes += encode_u32(static_cast<uint32_t>(message.fields.size()));
  for (const auto& field : message.fields) {
    bytes += encode_u32(static_cast<uint32_t>(field.size()));
    bytes += field;
  }
  return bytes;
}

std::optional<Message> parse_body(std::string_view bytes) {
  ByteReader reader(bytes);
  Message message;
  message.code = static_cast<uint8_t>(reader.take_number(1));
  message.number = static_cast<int64_t>(reader.take_number(8));
  const uint64_t count = reader.take_number(4);
  // Each field has at least its size. So a count that the bytes cannot hold reserves no memory.
  if (!reader.ok() || count > reader.left() / 4) return std::nullopt;
  message.fields.reserve(count);
  for (uint64_t i = 0; i < count && reader.ok(); i++) message.fields.emplace_back(reader.take(reader.take_number(4)));
  if (!reader.ok() || reader.left() != 0) return std::nullopt;
  return message;
}

bool is_request(const Message& message) {
  const size_t fields = message.fields.size();
  for (const auto& shape : kRequestShapes)
    if (message.code == static_cast<uint8_t>(shape.code))
      return fields >= shape.min_fields && fields <= shape.max_fields && fields % shape.fields_per_key == 0;
  return false;
}

bool is_reply(const Message& message) {
  if (message.code == static_cast<uint8_t>(ReplyCode::Done)) return true;
  const bool has_reason = message.fields.size() == 1;
  return has_reason && (message.code == static_cast<uint8_t>(ReplyCode::TimedOut) ||
                        message.code == static_cast<uint8_t>(ReplyCode::Refused));
}

Frame parse_frame(std::string_view bytes) {
  ByteReader reader(bytes);
  const uint64_t body_size = reader.take_number(4);
  if (!reader.ok()) return {.size = 4};
  if (body_size > kMaxBodyBytes) return {.state = ParseState::Invalid};
  const size_t size = 4 + body_size + kDigestBytes;
  const auto body = reader.take(body_size), tag = reader.take(kDigestBytes);
  if (!reader.ok()) return {.size = size};
  return {ParseState::Complete, body, tag, size};
}

Hello parse_server_hello(std::string_view bytes) { return parse_hello(bytes, 0); }
Hello parse_client_hello(std::string_view bytes) { return parse_hello(bytes, kDigestBytes); }

}  // namespace tessera::comm::store
