#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Zip archives without compression: the form of torch.save.
namespace tessera::dcp {

// The entries of an archive in memory, by name without the first folder: "data.pkl", "data/0". Entries share the
// memory. Throws UsageError, which starts with `what`, if the archive is damaged, or an entry is compressed.
std::map<std::string, std::span<const std::byte>> read_zip(std::span<const std::byte> archive, const std::string& what);

// Writes an archive with the folder "archive/". The data of each entry begin at a multiple of 64 bytes of the archive.
// Requires: less than 4 GiB in all.
void write_zip(const std::vector<std::pair<std::string, std::span<const std::byte>>>& entries,
               const std::function<void(std::span<const std::byte>)>& write);

// The checksum of zip (CRC-32 of ISO 3309).
uint32_t crc32(std::span<const std::byte> bytes);

}  // namespace tessera::dcp
