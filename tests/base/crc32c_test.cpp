// CRC-32C by the instruction of the processor equals that by tables, for all lengths, positions and divisions.
#include "tessera/base/detail/crc32c.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace tessera {
namespace {

TEST(Crc32c, KnownValues) {  // RFC 3720, B.4
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32)), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::vector<std::byte>(32, std::byte{0xff})), 0x62a8ab43u);
}

TEST(Crc32c, TheInstructionEqualsTheTables) {
  std::mt19937 random(1);
  std::vector<std::byte> all(100'000);
  for (auto& byte : all) byte = static_cast<std::byte>(random());
  for (int i = 0; i < 300; i++) {
    const size_t start = random() % 64, size = i < 100 ? random() % 64 : random() % (all.size() - 64);
    const auto bytes = std::span(all).subspan(start, size);
    const auto before = static_cast<uint32_t>(random());
    ASSERT_EQ(crc32c(bytes, before), crc32c_by_tables(bytes, before)) << start << " " << size;
    const size_t middle = size == 0 ? 0 : random() % size;
    ASSERT_EQ(crc32c(bytes.subspan(middle), crc32c(bytes.first(middle))), crc32c(bytes)) << size << " " << middle;
  }
}

}  // namespace
}  // namespace tessera
