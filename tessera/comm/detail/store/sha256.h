#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104). The library depends on LibTorch alone, which has neither.
// Byte strings are std::string and std::string_view: a char is a byte.
namespace tessera::comm::store {

inline constexpr size_t kDigestBytes = 32;
using Digest = std::array<char, kDigestBytes>;
inline std::string_view view(const Digest& digest) { return {digest.data(), digest.size()}; }

// Example:  Sha256 hash;  hash.update("ab");  hash.update("c");  hash.finish() == SHA-256 of "abc"
class Sha256 {
 public:
  void update(std::string_view bytes);
  Digest finish();  // Requires: called once, after the last update().

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};  // the input that does not fill a block yet
  size_t filled_ = 0;
  uint64_t total_bytes_ = 0;
};

// A copy continues from the same state. One object made from the key is the start of every MAC with that key:
//   HmacSha256 mac = keyed;  mac.update(message);  mac.finish()
class HmacSha256 {
 public:
  explicit HmacSha256(std::string_view key);
  void update(std::string_view bytes) { inner_.update(bytes); }
  Digest finish();

 private:
  Sha256 inner_, outer_;
};

Digest sha256(std::string_view bytes);
Digest hmac_sha256(std::string_view key, std::string_view bytes);

// The time does not depend on the position of the first difference, so a peer cannot guess a MAC byte by byte.
bool equal_in_constant_time(std::string_view a, std::string_view b);

// Bytes from the random number generator of the kernel.
std::string random_bytes(size_t count);

}  // namespace tessera::comm::store
