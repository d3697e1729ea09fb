#include "tessera/checkpoint/detail/zip_archive.h"

#include "tessera/base/error.h"

#include <array>
#include <cstring>

// APPNOTE.TXT of PKWARE has the format. A local header stands before the data of each entry; the central directory
// after all of them repeats the headers, with the places; its own place is in the end record.
namespace tessera::dcp {
namespace {

constexpr uint32_t kLocalHeader = 0x04034b50, kCentralHeader = 0x02014b50, kEndRecord = 0x06054b50,
                   kEndRecord64 = 0x06064b50;
constexpr size_t kLocalBytes = 30, kCentralBytes = 46, kEndBytes = 22, kEnd64Bytes = 56, kLocator64Bytes = 20;
constexpr size_t kAlignment = 64;

// Reads numbers at places of the archive, which may be wrong.
struct ZipBytes {
  std::span<const std::byte> bytes;

  std::span<const std::byte> part(uint64_t at, uint64_t count) const {
    TESSERA_CHECK(at <= bytes.size() && count <= bytes.size() - at, UsageError, "the archive has ", bytes.size(),
                  " bytes, and ", count, " at byte ", at, " are expected: it is damaged");
    return bytes.subspan(at, count);
  }
  template <class T>
  T number(uint64_t at) const {
    T value;
    std::memcpy(&value, part(at, sizeof value).data(), sizeof value);
    return value;
  }
  std::string text(uint64_t at, uint64_t count) const {
    const auto found = part(at, count);
    return {reinterpret_cast<const char*>(found.data()), found.size()};
  }
};

struct ZipDirectory {
  uint64_t at = 0, entries = 0;
};

ZipDirectory find_directory(const ZipBytes& zip) {
  // The end record is last; a comment may follow it, which torch.save does not write.
  TESSERA_CHECK(zip.bytes.size() >= kEndBytes, UsageError, zip.bytes.size(), " bytes are too few for an archive");
  const uint64_t end = zip.bytes.size() - kEndBytes;
  TESSERA_CHECK(zip.number<uint32_t>(end) == kEndRecord, UsageError, "it does not end as an archive of torch.save");
  ZipDirectory found{zip.number<uint32_t>(end + 16), zip.number<uint16_t>(end + 10)};
  const bool large = found.at == UINT32_MAX || found.entries == UINT16_MAX;
  if (large) {
    const uint64_t end64 = zip.number<uint64_t>(end - kLocator64Bytes + 8);
    TESSERA_CHECK(zip.number<uint32_t>(end64) == kEndRecord64, UsageError, "its zip64 record is damaged");
    found = {zip.number<uint64_t>(end64 + 48), zip.number<uint64_t>(end64 + 32)};
  }
  return found;
}

struct ZipPlace {
  uint64_t bytes, header;
};

// The fields of a central header that do not fit 32 bits are in its extra field 1, in this order.
void read_zip64(const ZipBytes& zip, uint64_t at, uint64_t end, ZipPlace& place, bool compressed_is_large) {
  while (at + 4 <= end) {
    const auto id = zip.number<uint16_t>(at), size = zip.number<uint16_t>(at + 2);
    uint64_t field = at + 4;
    if (id == 1) {
      if (place.bytes == UINT32_MAX) place.bytes = zip.number<uint64_t>(field), field += 8;
      if (compressed_is_large) field += 8;
      if (place.header == UINT32_MAX) place.header = zip.number<uint64_t>(field);
    }
    at += 4 + size;
  }
}

template <class T>
void put(std::string& bytes, T value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

std::map<std::string, std::span<const std::byte>> read_zip(std::span<const std::byte> archive,
                                                           const std::string& what) try {
  const ZipBytes zip{archive};
  std::map<std::string, std::span<const std::byte>> entries;
  const auto directory = find_directory(zip);
  uint64_t at = directory.at;
  for (uint64_t i = 0; i < directory.entries; i++) {
    TESSERA_CHECK(zip.number<uint32_t>(at) == kCentralHeader, UsageError, "its directory is damaged at byte ", at);
    const auto method = zip.number<uint16_t>(at + 10);
    const auto compressed = zip.number<uint32_t>(at + 20);
    ZipPlace place{zip.number<uint32_t>(at + 24), zip.number<uint32_t>(at + 42)};
    const auto name_bytes = zip.number<uint16_t>(at + 28), extra = zip.number<uint16_t>(at + 30),
               comment = zip.number<uint16_t>(at + 32);
    auto name = zip.text(at + kCentralBytes, name_bytes);
    const uint64_t extra_at = at + kCentralBytes + name_bytes;
    read_zip64(zip, extra_at, extra_at + extra, place, compressed == UINT32_MAX);
    TESSERA_CHECK(method == 0, UsageError, "'", name, "' is compressed");
    TESSERA_CHECK(zip.number<uint32_t>(place.header) == kLocalHeader, UsageError, "'", name, "' has no header");
    const uint64_t data =
        place.header + kLocalBytes + zip.number<uint16_t>(place.header + 26) + zip.number<uint16_t>(place.header + 28);
    const auto slash = name.find('/');
    if (slash != name.npos) name.erase(0, slash + 1);
    entries[name] = zip.part(data, place.bytes);
    at = extra_at + extra + comment;
  }
  return entries;
} catch (const UsageError& error) {
  TESSERA_FAIL(UsageError, what, ": ", error.what_without_backtrace());
}

uint32_t crc32(std::span<const std::byte> bytes) {
  // Eight bytes at a time: tables[k][b] is the effect of byte b that k bytes follow.
  static const auto tables = [] {
    std::array<std::array<uint32_t, 256>, 8> made{};
    for (uint32_t b = 0; b < 256; b++) {
      uint32_t value = b;
      for (int bit = 0; bit < 8; bit++) value = value & 1 ? value >> 1 ^ 0xEDB88320u : value >> 1;
      made[0][b] = value;
    }
    for (size_t k = 1; k < 8; k++)
      for (size_t b = 0; b < 256; b++) made[k][b] = made[k - 1][b] >> 8 ^ made[0][made[k - 1][b] & 0xFF];
    return made;
  }();
  uint32_t crc = ~0u;
  size_t i = 0;
  for (; i + 8 <= bytes.size(); i += 8) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    word ^= crc;
    crc = 0;
    for (size_t k = 0; k < 8; k++) crc ^= tables[7 - k][word >> (8 * k) & 0xFF];
  }
  for (; i < bytes.size(); i++) crc = crc >> 8 ^ tables[0][(crc ^ static_cast<uint32_t>(bytes[i])) & 0xFF];
  return ~crc;
}

void write_zip(const std::vector<std::pair<std::string, std::span<const std::byte>>>& entries,
               const std::function<void(std::span<const std::byte>)>& write) {
  uint64_t at = 0;
  std::string directory;
  const auto emit = [&](std::span<const std::byte> bytes) {
    write(bytes);
    at += bytes.size();
  };
  for (const auto& [name, data] : entries) {
    const auto path = "archive/" + name;
    const uint64_t header = at;
    // An extra field (id "FB", as torch.save writes it) moves the data to a multiple of 64 bytes.
    const uint64_t before = header + kLocalBytes + path.size() + 4;
    const auto padding = static_cast<uint16_t>((kAlignment - before % kAlignment) % kAlignment);
    std::string fields;  // common to both headers
    put(fields, uint16_t{0});
    put(fields, uint16_t{0});  // stored
    put(fields, uint32_t{0});  // no time
    put(fields, crc32(data));
    put(fields, static_cast<uint32_t>(data.size()));
    put(fields, static_cast<uint32_t>(data.size()));
    put(fields, static_cast<uint16_t>(path.size()));
    std::string local;
    put(local, kLocalHeader);
    put(local, uint16_t{0});  // version
    local += fields;
    put(local, static_cast<uint16_t>(4 + padding));
    local += path;
    local += "FB";
    put(local, padding);
    local.append(padding, 'Z');
    put(directory, kCentralHeader);
    put(directory, uint32_t{0});  // versions
    directory += fields;
    put(directory, uint64_t{0});  // no extra field, comment, disk, attributes
    put(directory, uint32_t{0});
    put(directory, static_cast<uint32_t>(header));
    directory += path;
    emit(std::as_bytes(std::span(local)));
    emit(data);
  }
  const uint64_t directory_at = at, directory_bytes = directory.size();
  put(directory, kEndRecord);
  put(directory, uint32_t{0});  // disks
  put(directory, static_cast<uint16_t>(entries.size()));
  put(directory, static_cast<uint16_t>(entries.size()));
  put(directory, static_cast<uint32_t>(directory_bytes));
  put(directory, static_cast<uint32_t>(directory_at));
  put(directory, uint16_t{0});
  emit(std::as_bytes(std::span(directory)));
}

}  // namespace tessera::dcp
