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

uint32_t crc_by_tables(std::span<const std::byte> bytes, uint32_t crc) {
  static_assert(std::endian::native == std::endian::little);
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) {
    uint64_t word;
    std::memcpy(&word, bytes.data(), 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; k++) crc ^= kCrcTables[7 - k][word >> (8 * k) & 255];
  }
  for (const std::byte byte : bytes) crc = crc >> 8 ^ kCrcTables[0][(crc ^ static_cast<uint32_t>(byte)) & 255];
  return crc;
}

#ifdef __x86_64__

// The instruction crc32 has a latency of three cycles and can start in every cycle. So three parts of kPart bytes are
// processed together. With zeros appended a CRC is a linear function of the CRC before, so tables combine the parts.
constexpr size_t kPart = 4096;

// Table k has the CRC of byte << 8k followed by kPart zero bytes.
const std::array<CrcTable, 4>& part_tables() {
  static const auto made = [] {
    constexpr std::array<std::byte, kPart> zeros{};
    std::array<CrcTable, 4> tables{};
    for (size_t k = 0; k < 4; k++) {
      for (size_t bit = 0; bit < 8; bit++) tables[k][1u << bit] = crc_by_tables(zeros, 1u << (8 * k + bit));
      for (size_t byte = 1; byte < 256; byte++)
        if (const size_t rest = byte & (byte - 1)) tables[k][byte] = tables[k][rest] ^ tables[k][byte ^ rest];
    }
    return tables;
  }();
  return made;
}

uint32_t append_zeros(const std::array<CrcTable, 4>& tables, uint32_t crc) {
  return tables[0][crc & 255] ^ tables[1][crc >> 8 & 255] ^ tables[2][crc >> 16 & 255] ^ tables[3][crc >> 24];
}

__attribute__((target("sse4.2"))) uint32_t crc_by_instruction(std::span<const std::byte> bytes, uint32_t crc) {
  const auto word_at = [](const std::byte* at) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    return word;
  };
  if (bytes.size() >= 3 * kPart) {
    const auto& tables = part_tables();
    for (; bytes.size() >= 3 * kPart; bytes = bytes.subspan(3 * kPart)) {
      uint64_t first = crc, second = 0, third = 0;
      for (const std::byte *at = bytes.data(), *end = at + kPart; at < end; at += 8) {
        first = __builtin_ia32_crc32di(first, word_at(at));
        second = __builtin_ia32_crc32di(second, word_at(at + kPart));
        third = __builtin_ia32_crc32di(third, word_at(at + 2 * kPart));
      }
      crc = append_zeros(tables, static_cast<uint32_t>(first)) ^ static_cast<uint32_t>(second);
      crc = append_zeros(tables, crc) ^ static_cast<uint32_t>(third);
    }
  }
  uint64_t wide = crc;
  for (; bytes.size() >= 8; bytes = bytes.subspan(8)) wide = __builtin_ia32_crc32di(wide, word_at(bytes.data()));
  return crc_by_tables(bytes, static_cast<uint32_t>(wide));
}

bool has_instruction() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}

#else

bool has_instruction() { return false; }
uint32_t crc_by_instruction(std::span<const std::byte> bytes, uint32_t crc) { return crc_by_tables(bytes, crc); }

#endif

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before) {
  return ~(has_instruction() ? crc_by_instruction(bytes, ~before) : crc_by_tables(bytes, ~before));
}

uint32_t crc32c_by_tables(std::span<const std::byte> bytes, uint32_t before) { return ~crc_by_tables(bytes, ~before); }

uint32_t crc32c(std::string_view text) { return crc32c(std::as_bytes(std::span(text))); }

}  // namespace tessera
