// .safetensors files: written and read back; invalid headers of all kinds.
#include "tessera/checkpoint/safetensors_file.h"

#include "new_folder.h"
#include "tessera/base/detail/crc32c.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cstring>

namespace tessera::dcp {
namespace {

std::string file_of(const std::string& header, size_t data_bytes) {
  std::string bytes(8, '\0');
  const uint64_t length = header.size();
  std::memcpy(bytes.data(), &length, 8);
  return bytes + header + std::string(data_bytes, '\7');
}

TEST(Safetensors, AllDtypesAndStridesRoundTrip) {
  const NewFolder folder;
  const auto base = at::arange(24, at::kFloat).view({2, 3, 4});
  const std::vector<std::pair<std::string, at::Tensor>> tensors{
      {"bool", base.gt(3)},
      {"bytes", base.to(at::kByte)},
      {"float", base},
      {"transposed", base.transpose(0, 2)},
      {"half", base.to(at::kHalf)},
      {"bfloat", base.to(at::kBFloat16)},
      {"double", base.to(at::kDouble)},
      {"long", base.to(at::kLong)},
      {"int", base.to(at::kInt)},
      {"short", base.to(at::kShort)},
      {"char", base.to(at::kChar)},
      {"e4m3", base.to(at::kFloat8_e4m3fn)},
      {"e5m2", base.to(at::kFloat8_e5m2)},
      {"u16", base.to(at::kUInt16)},
      {"scalar", at::scalar_tensor(3.5)},
      {"empty", at::empty({0, 3})},
      {"a \"name\"\n\xc3\xa9", at::ones({1})},
  };
  int written = 0;
  const auto sums = write_safetensors(folder / "x.safetensors", tensors,
                                      {.metadata = {{"format", "pt"}}, .after_each = [&] { written++; }});
  EXPECT_EQ(written, 17);
  const SafetensorsFile file(folder / "x.safetensors");
  EXPECT_EQ(file.header().tensors.size(), tensors.size());
  EXPECT_EQ(file.header().metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
  for (size_t i = 0; i < tensors.size(); i++) {
    const auto& [name, tensor] = tensors[i];
    const auto* entry = file.find(name);
    ASSERT_NE(entry, nullptr) << name;
    const auto back = file.tensor(*entry);
    EXPECT_EQ(back.scalar_type(), tensor.scalar_type()) << name;
    EXPECT_EQ(back.sizes(), tensor.sizes()) << name;
    EXPECT_TRUE(back.flatten().view(at::kByte).equal(tensor.flatten().view(at::kByte))) << name;
    EXPECT_EQ(crc32c(file.bytes(*entry)), sums[i]) << name;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(file.bytes(*entry).data()) % tensor.itemsize(), 0u) << name;
  }
  EXPECT_EQ(file.find("nothing"), nullptr);
  EXPECT_ERROR(UsageError, write_safetensors(folder / "x.safetensors", {}), "cannot create the file", "File exists");
}

TEST(Safetensors, TensorsKeepTheFileMappedAndUnalignedOnesAreCopied) {
  const NewFolder folder;
  write(folder / "x", file_of(R"({"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},)"
                              R"("f":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
                              9));
  at::Tensor f, w;
  {
    const SafetensorsFile file(folder / "x");
    f = file.tensor(*file.find("f"));
    w = file.tensor(*file.find("w"));
  }
  EXPECT_EQ(w.item<uint8_t>(), 7);
  EXPECT_EQ(f.view(at::kByte).sum().item<int64_t>(), 7 * 8);
}

struct InvalidHeader {
  const char* header;
  const char* message;
  size_t data = 24;
};

TEST(Safetensors, InvalidHeadersAreErrors) {
  const InvalidHeader invalid[] = {
      {"", "the header does not begin with '{'"},
      {"[]", "the header does not begin with '{'"},
      {" {}", "the header does not begin with '{'"},
      {"{", "the header"},
      {R"({"w":1})", "tensor 'w': "},
      {R"({"w":{}})", "tensor 'w': there is no 'shape'"},
      {R"({"w":{"dtype":"F32","shape":[6]}})", "tensor 'w': there is no 'data_offsets'"},
      {R"({"w":{"dtype":"F31","shape":[6],"data_offsets":[0,24]}})", "dtype 'F31' is not a dtype of LibTorch"},
      {R"({"w":{"dtype":"F32","shape":"6","data_offsets":[0,24]}})", "tensor 'w': "},
      {R"({"w":{"dtype":"F32","shape":[6.0],"data_offsets":[0,24]}})", "tensor 'w': "},
      {R"({"w":{"dtype":"F32","shape":[6],"data_offsets":[0]}})", "data_offsets are [0], which is not a byte range"},
      {R"({"w":{"dtype":"F32","shape":[6],"data_offsets":[24,0]}})", "data_offsets are [24, 0], which is not"},
      {R"({"w":{"dtype":"F32","shape":[6],"data_offsets":[-24,0]}})", "data_offsets are [-24, 0], which is not"},
      {R"({"w":{"dtype":"F32","shape":[5],"data_offsets":[0,24]}})", "it has 24 bytes, and F32[5] needs 20"},
      {R"({"w":{"dtype":"F32","shape":[-6],"data_offsets":[0,24]}})", "F32[-6] needs an impossible number of bytes"},
      {R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})",
       "an impossible number of bytes"},
      {R"({"w":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"w":{}})", "has 'w' twice"},
      {R"({"w":{"dtype":"F32","shape":[7],"data_offsets":[0,28]}})",
       "the tensors have 28 bytes, and 24 are in the file: it is truncated"},
      {R"({"w":{"dtype":"F32","shape":[5],"data_offsets":[0,20]}})",
       "the tensors have 20 bytes, and 24 are in the file"},
      {R"({"w":{"dtype":"F32","shape":[5],"data_offsets":[4,24]}})",
       "tensor 'w' begins at byte 4 of the data, which leaves a gap: the previous tensor ends at 0"},
      {R"({"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"b":{"dtype":"F32","shape":[4],"data_offsets":[8,24]}})",
       "tensor 'b' begins at byte 8 of the data, inside of the previous tensor, which ends at 16"},
      {R"({"a":{"dtype":"F32","shape":[6],"data_offsets":[0,24]},"b":{"dtype":"F32","shape":[6],"data_offsets":[0,24]}})",
       "tensor 'b' begins at byte 0 of the data, inside of"},
      {R"({"__metadata__":[]})", "__metadata__ is not an object", 0},
      {R"({"__metadata__":{"a":1}})", "metadata 'a' is not a string", 0},
  };
  const NewFolder folder;
  for (const auto& each : invalid) {
    write(folder / "bad.safetensors", file_of(each.header, each.data));
    EXPECT_ERROR(UsageError, SafetensorsFile(folder / "bad.safetensors"), each.message, "bad.safetensors");
  }
}

TEST(Safetensors, OtherFilesAreErrors) {
  const NewFolder folder;
  const auto expect_error = [&](const std::string& bytes, const std::string& text) {
    write(folder / "x", bytes);
    EXPECT_ERROR(UsageError, SafetensorsFile(folder / "x"), text);
  };
  expect_error("", " empty");
  expect_error("1234567", "7 bytes are too few for a safetensors file");
  expect_error(std::string(8, '\0'), "the header does not begin with '{'");
  expect_error(std::string(9, '\xff'), "announce a header of 18446744073709551615 bytes");
  expect_error(std::string("\x10\0\0\0\0\0\0\0{}", 10),
               "the header has 16 bytes, and only 2 follow: the file is truncated");
  EXPECT_ERROR(UsageError, SafetensorsFile(folder / "nowhere"), "cannot read the tensors", "No such file");
  EXPECT_ERROR(UsageError, SafetensorsFile(folder.path()), folder.path());
}

// After any change of a byte, the reader rejects the file or returns tensors inside of it.
TEST(Safetensors, ChangedBytesNeverCauseReadsOutsideTheFile) {
  const NewFolder folder;
  write_safetensors(folder / "good", {{"w", at::ones({2, 3})}, {"b", at::ones({3}, at::kLong)}, {"e", at::empty({0})}},
                    {.metadata = {{"format", "pt"}}});
  const auto good = read(folder / "good");
  const size_t header = good.size() - 24 - 24;
  int rejected = 0, accepted = 0;
  for (size_t at = 0; at < header; at++)
    for (const unsigned char byte : {0x00, 0x22, 0x39, 0x7b}) {
      auto bad = good;
      bad[at] = static_cast<char>(byte);
      write(folder / "bad", bad);
      try {
        const SafetensorsFile file(folder / "bad");
        for (const auto& entry : file.header().tensors) (void)file.tensor(entry).to(at::kDouble).sum();
        accepted++;
      } catch (const UsageError&) {
        rejected++;
      }
    }
  EXPECT_GT(rejected, 300);
  EXPECT_GT(accepted, 10);  // for example another letter in a name
  for (size_t length = 0; length < good.size(); length++) {
    write(folder / "bad", good.substr(0, length));
    EXPECT_THROW(SafetensorsFile(folder / "bad"), UsageError) << length;
  }
  write(folder / "bad", good + "x");
  EXPECT_ERROR(UsageError, SafetensorsFile(folder / "bad"), "the tensors have 48 bytes, and 49 are in the file");
}

TEST(Crc32c, MatchesTheStandard) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);  // RFC 3720, B.4
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  const std::string text = "any text that is longer than eight bytes";
  const auto bytes = std::as_bytes(std::span(text));
  for (size_t split = 0; split <= text.size(); split++)
    EXPECT_EQ(crc32c(bytes.subspan(split), crc32c(bytes.first(split))), crc32c(text));
}

}  // namespace
}  // namespace tessera::dcp
