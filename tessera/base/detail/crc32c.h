#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace tessera {

// CRC-32C (Castagnoli), as iSCSI, ext4 and TFRecord have it. `before` is that of the bytes in front, so that a long
// text can be looked at part by part.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t before = 0);
uint32_t crc32c(std::string_view text);

}  // namespace tessera
