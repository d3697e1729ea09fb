// .distcp checkpoints of torch.distributed.checkpoint: written and read back, damaged, hostile. tests/parity reads and
// writes them with Python.
#include "tessera/checkpoint/detail/distcp.h"

#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/pickle.h"
#include "tessera/checkpoint/detail/shard_reader.h"
#include "tessera/checkpoint/detail/zip_archive.h"
#include "tessera/checkpoint/load.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <random>

namespace tessera::dcp {
namespace {

using testing::Rank;
using testing::run_ranks;

// "w" (5, 3) in two shards of two files, others in one.
const std::map<std::string, at::Tensor>& distcp_values() {
  static const std::map<std::string, at::Tensor> values = [] {
    std::map<std::string, at::Tensor> made;
    const auto numbers = at::arange(15, at::kFloat).view({5, 3});
    made["w"] = numbers;
    for (const auto dtype :
         {at::kBFloat16, at::kBool, at::kHalf, at::kDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2, at::kShort, at::kInt,
          at::kLong, at::kChar, at::kUInt16, at::kUInt32, at::kUInt64, at::kByte})
      made[c10::str("d", dtype)] = numbers.to(dtype);
    made["scalar"] = at::scalar_tensor(2.5, at::kDouble);
    made["empty"] = at::zeros({0, 4});
    return made;
  }();
  return values;
}

Manifest distcp_manifest() {
  Manifest manifest{{{"step", 7}, {"lr", 0.5}, {"name", "gpt"}, {"large", int64_t{1} << 40}}, {}};
  for (const auto& [name, value] : distcp_values()) {
    SavedTensor tensor{name, value.scalar_type(), Sizes(value.sizes().begin(), value.sizes().end()), {}};
    if (name == "w") {
      tensor.shards = {{"a", {{0, 0}, {2, 3}}, {}}, {"b", {{2, 0}, {3, 3}}, {}}};
    } else {
      tensor.shards = {{"a", Box::full(value.sizes()), {}}};
    }
    manifest.tensors.push_back(std::move(tensor));
  }
  return manifest;
}

void write_sample(const std::string& folder) {
  write_distcp(distcp_manifest(), folder, [](const SavedTensor& tensor, const SavedShard& shard) {
    auto part = distcp_values().at(tensor.name);
    for (size_t d = 0; d < shard.box.sizes.size(); d++)
      part = part.narrow(static_cast<int64_t>(d), shard.box.offsets[d], shard.box.sizes[d]);
    return part;
  });
}

TEST(Distcp, ReadsWhatItWrites) {
  const NewFolder folder;
  write_sample(folder / "c");
  const auto source = open_source(folder / "c");
  EXPECT_EQ(source.manifest.values, distcp_manifest().values);
  ShardReader reader(source.folder);
  EXPECT_EQ(source.manifest.tensors.size(), distcp_values().size());
  for (const auto& tensor : source.manifest.tensors) {
    const auto& expected = distcp_values().at(tensor.name);
    const auto found = reader.read_all(tensor, true);
    EXPECT_EQ(found.scalar_type(), expected.scalar_type()) << tensor.name;
    EXPECT_EQ(found.sizes(), expected.sizes()) << tensor.name;
    const auto bytes = [](const at::Tensor& t) { return t.contiguous().reshape({-1}).view(at::kByte); };
    EXPECT_TRUE(bytes(found).equal(bytes(expected))) << tensor.name;
  }
  EXPECT_EQ(source.manifest.find("w")->shards.size(), 2u);
  EXPECT_ERROR(UsageError, write_sample(folder / "c"), "is not empty");
}

TEST(Distcp, LoadsOntoAnotherMesh) {
  const NewFolder folder;
  write_sample(folder / "c");
  run_ranks(3, [&](Rank& me) {
    const auto mesh = me.mesh("dp=3");
    const StateDict dict{{"w", zeros({5, 3}, mesh, {Shard(0)})}, {"scalar", at::zeros({}, at::kDouble)}};
    EXPECT_EQ(load(dict, folder / "c", {.strict = false}).missing.size(), 0u);
    const auto expected = distribute_tensor(distcp_values().at("w"), mesh, {Shard(0)}, {.src_data_rank = {}});
    EXPECT_TRUE(DTensor(dict.at("w")).to_local().equal(expected.to_local()));
    EXPECT_EQ(dict.at("scalar").item<double>(), 2.5);
  });
}

TEST(Distcp, ANameThatIsNotOfACheckpointIsRefused) {
  PickleWriter hostile;
  hostile.global("os", "system").begin_tuple().text("echo").end_tuple().call();
  EXPECT_ERROR(UsageError, Pickle::parse(hostile.finish(), "file"), "file: it names os.system",
               "nothing of it was executed");
  PickleWriter sneaky;  // a torch name that can be called
  sneaky.global("torch", "load").begin_tuple().text("x").end_tuple().call();
  EXPECT_ERROR(UsageError, Pickle::parse(sneaky.finish(), "file"), "it names torch.load");
  const NewFolder folder;
  std::filesystem::create_directory(folder / "c");
  write(folder / "c/.metadata", PickleWriter().begin_list().end_list().finish());
  EXPECT_ERROR(UsageError, open_source(folder / "c"), ".metadata: it is not the Metadata of a checkpoint");
}

// Every truncation, and random changes of bytes: an error that names the file, or values.
TEST(Distcp, DamageIsAnErrorOrAnotherValue) {
  const NewFolder folder;
  write_sample(folder / "c");
  std::mt19937 random(7);
  int refused = 0;
  const auto read_everything = [&] {
    try {
      const auto source = open_source(folder / "c");
      ShardReader reader(source.folder);
      for (const auto& tensor : source.manifest.tensors) reader.read_all(tensor, true).clone();
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what_without_backtrace()).find(folder.path()), std::string::npos)
          << error.what_without_backtrace();
      refused++;
    }
  };
  for (const std::string name : {".metadata", "__0_0.distcp"}) {
    const auto good = read(folder / ("c/" + name));
    for (int i = 0; i < 150; i++) {
      auto bad = good;
      if (i % 3 == 0)
        bad.resize(1 + random() % (bad.size() - 1));
      else
        bad[random() % bad.size()] = static_cast<char>(random());
      write(folder / ("c/" + name), bad);
      read_everything();
    }
    write(folder / ("c/" + name), good);
  }
  EXPECT_GT(refused, 100);
  refused = 0;
  read_everything();
  EXPECT_EQ(refused, 0);
}

TEST(Zip, ChecksumsAreThoseOfZip) {
  const auto crc_of = [](std::string_view text) { return crc32(std::as_bytes(std::span(text))); };
  EXPECT_EQ(crc_of(""), 0u);
  EXPECT_EQ(crc_of("123456789"), 0xCBF43926u);  // the check value of the standard
  EXPECT_EQ(crc_of("The quick brown fox jumps over the lazy dog"), 0x414FA339u);
}

}  // namespace
}  // namespace tessera::dcp
