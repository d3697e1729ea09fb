#include "tessera/comm/detail/store/sha256.h"

#include "tessera/base/error.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace tessera::comm::store {
namespace {

// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
constexpr std::array<uint32_t, 64> kSha256Constants = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

constexpr size_t kSha256BlockBytes = 64;

uint32_t read_big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | uint32_t{bytes[3]};
}

}  // namespace

// The names w, a to h and the four sums are those of FIPS 180-4, section 6.2.2.
void Sha256::compress(const uint8_t* block) {
  std::array<uint32_t, 64> w;
  for (size_t t = 0; t < 16; t++) w[t] = read_big_endian(block + 4 * t);
  for (size_t t = 16; t < 64; t++) {
    const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ (w[t - 15] >> 3);
    const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ (w[t - 2] >> 10);
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t t = 0; t < 64; t++) {
    const uint32_t sum1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + sum1 + ((e & f) ^ (~e & g)) + kSha256Constants[t] + w[t];
    const uint32_t sum0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = sum0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<uint32_t, 8> change = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; i++) state_[i] += change[i];
}

void Sha256::update(std::string_view bytes) {
  total_bytes_ += bytes.size();
  while (!bytes.empty()) {
    if (filled_ == 0 && bytes.size() >= kSha256BlockBytes) {
      compress(reinterpret_cast<const uint8_t*>(bytes.data()));
      bytes.remove_prefix(kSha256BlockBytes);
      continue;
    }
    const size_t count = std::min(bytes.size(), kSha256BlockBytes - filled_);
    std::memcpy(block_.data() + filled_, bytes.data(), count);
    filled_ += count;
    bytes.remove_prefix(count);
    if (filled_ < kSha256BlockBytes) continue;
    compress(block_.data());
    filled_ = 0;
  }
}

// Padding: one bit 1, zeros, and the number of bits as 64 bits big endian, so that the last block is full.
Digest Sha256::finish() {
  const uint64_t bits = total_bytes_ * 8;
  const size_t zeros = (kSha256BlockBytes + 55 - filled_) % kSha256BlockBytes;
  std::string padding = '\x80' + std::string(zeros, '\0');
  for (int shift = 56; shift >= 0; shift -= 8) padding += static_cast<char>(bits >> shift);
  update(padding);
  Digest digest;
  for (size_t i = 0; i < digest.size(); i++) digest[i] = static_cast<char>(state_[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

// HMAC(key, message) = H((key ^ 0x5c...) | H((key ^ 0x36...) | message)), the key padded with zeros to one block.
HmacSha256::HmacSha256(std::string_view key) {
  const Digest hashed = sha256(key);
  std::string padded(key.size() > kSha256BlockBytes ? view(hashed) : key);
  padded.resize(kSha256BlockBytes, '\0');
  for (char& byte : padded) byte ^= 0x36;
  inner_.update(padded);
  for (char& byte : padded) byte ^= 0x36 ^ 0x5c;
  outer_.update(padded);
}

Digest HmacSha256::finish() {
  outer_.update(view(inner_.finish()));
  return outer_.finish();
}

Digest sha256(std::string_view bytes) {
  Sha256 hash;
  hash.update(bytes);
  return hash.finish();
}

Digest hmac_sha256(std::string_view key, std::string_view bytes) {
  HmacSha256 mac(key);
  mac.update(bytes);
  return mac.finish();
}

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile uint8_t difference = 0;  // volatile: the compiler must not leave the loop early
  for (size_t i = 0; i < a.size(); i++) difference = difference | static_cast<uint8_t>(a[i] ^ b[i]);
  return difference == 0;
}

std::string random_bytes(size_t count) {
  std::string bytes(count, '\0');
  for (size_t done = 0; done < count;) {
    const ssize_t n = getrandom(bytes.data() + done, count - done, 0);
    TESSERA_CHECK(n > 0 || errno == EINTR, CommError,
                  "the kernel gives no random bytes (getrandom): ", std::strerror(errno),
                  "; the store cannot authenticate without them");
    if (n > 0) done += static_cast<size_t>(n);
  }
  return bytes;
}

}  // namespace tessera::comm::store
