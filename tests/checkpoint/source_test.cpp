// Checkpoints of other libraries: one file, Hugging Face's folders, DCP's shards.
#include "tessera/checkpoint/detail/checkpoint_source.h"

#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::dcp {
namespace {

using testing::Rank;
using testing::run_ranks;
namespace fs = std::filesystem;

const std::string kIndex = "model.safetensors.index.json";

at::Tensor numbers() { return at::arange(10, at::kFloat).view({5, 2}); }

// Loads "w" over two ranks and compares it with numbers().
void expect_numbers(const std::string& path) {
  run_ranks(2, [&](Rank& me) {
    const auto w = zeros({5, 2}, me.mesh("dp=2"), {Shard(0)});
    load({{"w", w}}, path, {.strict = false});
    EXPECT_TRUE(w.to_local().equal(numbers().narrow(0, me.rank * 3, me.rank == 0 ? 3 : 2)));
  });
}

TEST(Source, ReadsOneFile) {
  const NewFolder folder;
  write_safetensors(folder / "model.safetensors", {{"w", numbers()}, {"b", at::ones({1})}});
  expect_numbers(folder / "model.safetensors");
  expect_numbers(folder.path());
  const auto source = open_source(folder / "model.safetensors");
  EXPECT_EQ(source.folder, folder.path());
  EXPECT_TRUE(source.manifest.values.empty());
  EXPECT_EQ(source.manifest.tensors.size(), 2u);
}

TEST(Source, IndexSelectsTheFiles) {
  const NewFolder folder;
  write_safetensors(folder / "model-00001-of-00002.safetensors", {{"w", numbers()}});
  write_safetensors(folder / "model-00002-of-00002.safetensors", {{"b", at::ones({1})}});
  write(folder / "consolidated.safetensors", "not a safetensors file");
  write(folder / kIndex, R"({"metadata":{"total_size":44},"weight_map":{"w":"model-00001-of-00002.safetensors",)"
                         R"("b":"model-00002-of-00002.safetensors"}})");
  expect_numbers(folder.path());
  struct IndexError {
    const char *index, *message;
  };
  const IndexError errors[] = {
      {R"({})", "'weight_map' is missing"},
      {R"({"weight_map":{"w":"../x.safetensors"}})", "'w' is mapped to \"../x.safetensors\", which is not a file name"},
      {R"({"weight_map":{"w":1}})", "'w' is mapped to 1, which is not a file name in this folder"},
      {R"({"weight_map":{"b":"model-00001-of-00002.safetensors"}})",
       "'b' is mapped to model-00001-of-00002.safetensors, but that file does not have it"},
      {R"({"weight_map":{"b":"model-00003-of-00002.safetensors"}})", "No such file"},
      {R"({"weight_map")", "JSON"},
  };
  for (const auto& each : errors) {
    write(folder / kIndex, each.index);
    EXPECT_ERROR(UsageError, open_source(folder.path()), each.message);
  }
}

std::string offsets(const std::string& text) { return R"({"w":{"saved_offsets":)" + text + "}}"; }

void write_shard(const NewFolder& folder, int rank, const at::Tensor& shard, const std::string& info) {
  const auto path = folder / c10::str("shard-0000", rank, "-model-00001-of-00001.safetensors");
  fs::remove(path);
  write_safetensors(path, {{"w", shard}}, {.metadata = {{"DCP_SHARDING_INFO", info}}});
}

TEST(Source, ShardsAreJoinedByTheirOffsets) {
  const NewFolder folder;
  write_shard(folder, 1, numbers().narrow(0, 0, 4), offsets("[0,0]"));
  write_shard(folder, 2, numbers().narrow(0, 4, 1), offsets("[4,0]"));
  expect_numbers(folder.path());
  EXPECT_EQ(open_source(folder.path()).manifest.find("w")->sizes, (Sizes{5, 2}));
}

TEST(Source, InvalidShardsAreErrors) {
  const NewFolder folder;
  write_shard(folder, 1, numbers().narrow(0, 0, 4), offsets("[0,0]"));
  struct ShardError {
    at::Tensor shard;
    std::string info;
    const char* message;
  };
  const ShardError errors[] = {
      {numbers().narrow(0, 4, 1), offsets("[3,0]"), "shards [0:4, 0:2] and [3:4, 0:2] overlap in [3:4, 0:2]"},
      {numbers().narrow(0, 4, 1), offsets("[5,0]"), "do not cover it exactly once: no shard has [4:5, 0:2]"},
      {numbers().narrow(0, 4, 1), offsets("[4]"), "DCP_SHARDING_INFO of 'w' has 1 offsets for 2 dims"},
      {numbers().narrow(0, 4, 1), offsets("[-4,0]"), "DCP_SHARDING_INFO of 'w' has the invalid offset -4"},
      {numbers().narrow(0, 4, 1), offsets("[9223372036854775807,0]"), "invalid offset 9223372036854775807"},
      {numbers().narrow(0, 4, 1), offsets("{}"), "DCP_SHARDING_INFO of 'w': "},
      {numbers().narrow(0, 4, 1), "{}", "DCP_SHARDING_INFO of 'w' is missing"},
      {numbers().narrow(0, 4, 1), "x", "DCP_SHARDING_INFO"},
      {at::ones({1}), offsets("[4]"),
       "'w' is Float of 2 dims in shard-00001-model-00001-of-00001.safetensors and Float"},
      {at::ones({1, 2}, at::kHalf), offsets("[4,0]"), "and Half of 2 dims in shard-00002"},
  };
  for (const auto& each : errors) {
    write_shard(folder, 2, each.shard, each.info);
    EXPECT_ERROR(UsageError, open_source(folder.path()), each.message);
  }
}

TEST(Source, PathsThatAreNotCheckpointsAreErrors) {
  const NewFolder folder;
  EXPECT_ERROR(UsageError, open_source(folder / "nowhere"), "the checkpoint '", "nowhere' does not exist");
  EXPECT_ERROR(UsageError, open_source(folder.path()),
               "is not a checkpoint: it has no tessera.json, no model.safetens");
  fs::create_directory(folder / "step-10");
  write(folder / "step-10/tessera.json", "{}");
  EXPECT_ERROR(UsageError, open_source(folder.path()), "did you mean '", "step-10'");
}

}  // namespace
}  // namespace tessera::dcp
