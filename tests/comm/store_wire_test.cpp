#include "tessera/comm/detail/store/wire.h"

#include "store_test_server.h"
#include "tessera/comm/detail/store/server_session.h"

#include <gtest/gtest.h>

#include <cstring>

namespace tessera::comm::store {
namespace {

std::string hex_of(const Digest& digest) {
  std::string text;
  for (const char byte : digest) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", static_cast<uint8_t>(byte));
    text += digits;
  }
  return text;
}

// The bytes at the end of their own heap block, so that the address sanitizer finds a read past the end.
struct ExactBytes {
  explicit ExactBytes(std::string_view bytes) : data(new char[bytes.size()]), size(bytes.size()) {
    std::memcpy(data.get(), bytes.data(), size);
  }
  operator std::string_view() const { return {data.get(), size}; }
  std::unique_ptr<char[]> data;
  size_t size;
};

Message random_message(std::mt19937& random) {
  Message message{static_cast<uint8_t>(random()), static_cast<int64_t>(random()) * 7919 * (random() % 2 ? 1 : -1)};
  for (size_t i = random() % 5; i > 0; i--) message.fields.push_back(random_text(random, 20));
  return message;
}

TEST(Sha256, EqualsTheVectorsOfFips180) {
  EXPECT_EQ(hex_of(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex_of(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex_of(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex_of(sha256("abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmno"
                          "pqrsmnopqrstnopqrstu")),
            "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1");
  EXPECT_EQ(hex_of(sha256(std::string(1000000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, EveryPaddingAndEverySplitOfTheInput) {
  Sha256 chain;  // the expected value is from Python's hashlib
  for (size_t n = 0; n < 300; n++) chain.update(view(sha256(std::string(n, 'a'))));
  EXPECT_EQ(hex_of(chain.finish()), "80e953e3b006c4bab43fd5d792f8bd29c122f6cf1497318365fe66bf2d61398d");
  const std::string text(200, 'x');
  for (size_t split = 0; split <= text.size(); split++) {
    Sha256 hash;
    hash.update(text.substr(0, split));
    hash.update(text.substr(split));
    EXPECT_EQ(hash.finish(), sha256(text)) << split;
  }
}

TEST(HmacSha256, EqualsTheVectorsOfRfc4231) {
  std::string counting;
  for (char byte = 1; byte <= 25; byte++) counting += byte;
  const struct {
    std::string key, data, mac;
  } cases[] = {
      {std::string(20, '\x0b'), "Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
      {"Jefe", "what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
      {std::string(20, '\xaa'), std::string(50, '\xdd'),
       "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
      {counting, std::string(50, '\xcd'), "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
      {std::string(20, '\x0c'), "Test With Truncation", "a3b6167473100ee06e0c796c2955552b"},  // 128 bits, as published
      {std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First",
       "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"},
      {std::string(131, '\xaa'),
       "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
       "hashed "
       "before being used by the HMAC algorithm.",
       "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2"},
  };
  for (const auto& c : cases) EXPECT_EQ(hex_of(hmac_sha256(c.key, c.data)).substr(0, c.mac.size()), c.mac) << c.data;
}

TEST(StoreWire, ConstantTimeComparisonFindsEveryBit) {
  const std::string text(32, 'm');
  EXPECT_TRUE(equal_in_constant_time(text, std::string(text)));
  EXPECT_FALSE(equal_in_constant_time(text, text + "m"));
  for (size_t bit = 0; bit < 8 * text.size(); bit++) {
    std::string other = text;
    other[bit / 8] = static_cast<char>(other[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_FALSE(equal_in_constant_time(text, other)) << bit;
  }
}

TEST(StoreWire, ABodyIsReadBackAndNoPrefixOrExtensionOfIt) {
  std::mt19937 random(1);
  for (int i = 0; i < 500; i++) {
    const Message message = random_message(random);
    const std::string bytes = encode_body(message);
    EXPECT_EQ(bytes.size(), body_bytes(message));
    EXPECT_EQ(parse_body(ExactBytes(bytes)), message);
    EXPECT_EQ(parse_body(ExactBytes(bytes + '\0')), std::nullopt);
    for (size_t size = 0; size < bytes.size(); size++)
      EXPECT_EQ(parse_body(ExactBytes(bytes.substr(0, size))), std::nullopt) << size;
  }
}

// parse_body(bytes) = m implies encode_body(m) = bytes
TEST(StoreWire, RandomAndChangedBodiesAreRefusedOrReadExactly) {
  std::mt19937 random(2);
  size_t accepted = 0;
  for (int i = 0; i < 50000; i++) {
    std::string bytes = i % 2 ? random_text(random, 60) : encode_body(random_message(random));
    for (size_t n = random() % 3; n > 0 && !bytes.empty(); n--)
      bytes[random() % bytes.size()] ^= static_cast<char>(random());
    const auto message = parse_body(ExactBytes(bytes));
    if (!message) continue;
    accepted++;
    EXPECT_EQ(encode_body(*message), bytes);
    (void)is_request(*message);
  }
  EXPECT_GT(accepted, 100u);
}

TEST(StoreWire, FieldCountsAndSizesBeyondTheBytesAreRefused) {
  const std::string head = '\x01' + encode_u64(0);
  EXPECT_FALSE(parse_body(ExactBytes(head + encode_u32(0xffffffff))));
  EXPECT_FALSE(parse_body(ExactBytes(head + encode_u32(0xffffffff) + encode_u32(0))));
  EXPECT_FALSE(parse_body(ExactBytes(head + encode_u32(1) + encode_u32(0xffffffff) + "abc")));
}

TEST(StoreWire, AFrameTellsHowManyBytesItNeeds) {
  const std::string bytes = encode_u32(3) + "abc" + std::string(kDigestBytes, 't');
  for (size_t size = 0; size < bytes.size(); size++) {
    const Frame frame = parse_frame(ExactBytes(bytes.substr(0, size)));
    EXPECT_EQ(frame.state, ParseState::Incomplete);
    EXPECT_EQ(frame.size, size < 4 ? 4 : bytes.size());
  }
  const std::string two = bytes + bytes;
  const Frame frame = parse_frame(two);
  EXPECT_EQ(frame.state, ParseState::Complete);
  EXPECT_EQ(frame.body, "abc");
  EXPECT_EQ(frame.tag, std::string(kDigestBytes, 't'));
  EXPECT_EQ(frame.size, bytes.size());
  EXPECT_EQ(parse_frame(encode_u32(kMaxBodyBytes)).state, ParseState::Incomplete);
  EXPECT_EQ(parse_frame(encode_u32(kMaxBodyBytes + 1)).state, ParseState::Invalid);
}

TEST(StoreWire, RequestsHaveTheFieldsOfTheirCode) {
  EXPECT_TRUE(is_request(make_message(RequestCode::Set, {"key", "value"})));
  EXPECT_FALSE(is_request(make_message(RequestCode::Set, {"key", "value", "key"})));
  EXPECT_FALSE(is_request(make_message(RequestCode::Add)));
  EXPECT_FALSE(is_request(make_message(RequestCode::NumKeys, {"key"})));
  EXPECT_FALSE(is_request(Message{0}));
  EXPECT_FALSE(is_request(Message{200}));
}

// Any bytes, in any portions, before and after authentication: no request comes out, and the session ends.
TEST(ServerSession, RandomBytesNeverBecomeARequest) {
  std::mt19937 random(3);
  const std::string text = make_job_secret();
  const JobSecret secret(text);
  for (int i = 0; i < 2000; i++) {
    ServerSession session(secret);
    const auto server_nonce = parse_server_hello(session.output()).nonce;
    const bool authenticated = i % 2 == 1;
    if (authenticated) {
      const std::string nonce = random_bytes(kNonceBytes);
      const ConnectionKeys keys(secret, server_nonce, nonce);
      session.receive(std::string(kMagic) + nonce + std::string(view(keys.client_proof)));
      EXPECT_FALSE(session.next_request());
      EXPECT_TRUE(session.is_authenticated());
    }
    std::string bytes = random_text(random, 300);
    if (authenticated && bytes.size() > 4 && i % 4 == 1) bytes.replace(0, 4, encode_u32(random() % 200));
    for (size_t at = 0; at < bytes.size(); at += 1 + i % 7) {
      session.receive(std::string_view(bytes).substr(at, 1 + i % 7));
      EXPECT_FALSE(session.next_request());
    }
    EXPECT_TRUE(authenticated || !session.is_authenticated());
  }
}

}  // namespace
}  // namespace tessera::comm::store
