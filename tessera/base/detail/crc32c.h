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

}  // namespace tessera
