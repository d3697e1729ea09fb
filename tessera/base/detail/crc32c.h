#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

// CRC-32C (Castagnoli), as in iSCSI, ext4 and TFRecord. `before` is the CRC of the preceding bytes, so a long text can
// be processed in parts.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before = 0);
uint32_t crc32c(std::string_view text);
// The same without the instruction of the processor, which is several times as fast. For processors that do not have
// it.
uint32_t crc32c_by_tables(std::span<const std::byte> bytes, uint32_t before = 0);

}  // namespace tessera
