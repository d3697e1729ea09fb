#include "tessera/base/detail/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace tessera {
namespace {

// Tables to process eight bytes at a time. Table k has the CRC of each byte followed by k zero bytes. Bits are
// reversed.
using CrcTable = std::array<uint32_t, 256>;
constexpr std::array<CrcTable, 8> kCrcTables = [] {
  std::array<CrcTable, 8> tables{};
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); k++)
    for (size_t byte = 0; byte < 256; byte++)
      tables[k][byte] = tables[k - 1][byte] >> 8 ^ tables[0][tables[k - 1][byte] & 255];
  return tables;
}();

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  static_assert(std::endian::native == std::endian::little);
  uint32_t crc = ~before;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; k++) crc ^= kCrcTables[7 - k][word >> (8 * k) & 255];
  }
  for (const std::byte byte : bytes) crc = crc >> 8 ^ kCrcTables[0][(crc ^ static_cast<uint32_t>(byte)) & 255];
  return ~crc;
}

uint32_t crc32c(std::string_view text) { return crc32c(std::as_bytes(std::span(text))); }

}  // namespace tessera
