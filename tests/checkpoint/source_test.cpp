// Checkpoints that others wrote: one file, Hugging Face's folders, DCP's shards.
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

TEST(Source, OneFile) {
  const NewFolder folder;
  write_safetensors(folder / "model.safetensors", {{"w", numbers()}, {"b", at::ones({1})}});
  expect_numbers(folder / "model.safetensors");
  expect_numbers(folder.path());
  const auto source = open_source(folder / "model.safetensors");
  EXPECT_EQ(source.folder, folder.path());
  EXPECT_TRUE(source.manifest.values.empty());
  EXPECT_EQ(source.manifest.tensors.size(), 2u);
}

TEST(Source, AnIndexNamesItsFilesAndOthersAreNotLookedAt) {
  const NewFolder folder;
  write_safetensors(folder / "model-00001-of-00002.safetensors", {{"w", numbers()}});
  write_safetensors(folder / "model-00002-of-00002.safetensors", {{"b", at::ones({1})}});
  write(folder / "consolidated.safetensors", "not one");
  write(folder / kIndex, R"({"metadata":{"total_size":44},"weight_map":{"w":"model-00001-of-00002.safetensors",)"
                         R"("b":"model-00002-of-00002.safetensors"}})");
  expect_numbers(folder.path());
  struct Bad {
    const char *index, *says;
  };
  const Bad bad[] = {
      {R"({})", "there is no 'weight_map'"},
      {R"({"weight_map":{"w":"../x.safetensors"}})", "'w' is to be in \"../x.safetensors\", which is no file of this"},
      {R"({"weight_map":{"w":1}})", "'w' is to be in 1, which is no file of this folder"},
      {R"({"weight_map":{"b":"model-00001-of-00002.safetensors"}})",
       "'b' is to be in model-00001-of-00002.safetensors, and is not"},
      {R"({"weight_map":{"b":"model-00003-of-00002.safetensors"}})", "No such file"},
      {R"({"weight_map")", "is no JSON"},
  };
  for (const auto& row : bad) {
    write(folder / kIndex, row.index);
    EXPECT_ERROR(UsageError, open_source(folder.path()), row.says);
  }
}

std::string offsets(const std::string& text) { return R"({"w":{"saved_offsets":)" + text + "}}"; }

void write_shard(const NewFolder& folder, int rank, const at::Tensor& piece, const std::string& info) {
  const auto path = folder / c10::str("shard-0000", rank, "-model-00001-of-00001.safetensors");
  fs::remove(path);
  write_safetensors(path, {{"w", piece}}, {.metadata = {{"DCP_SHARDING_INFO", info}}});
}

TEST(Source, ShardsAreJoinedByTheirOffsets) {
  const NewFolder folder;
  write_shard(folder, 1, numbers().narrow(0, 0, 4), offsets("[0,0]"));
  write_shard(folder, 2, numbers().narrow(0, 4, 1), offsets("[4,0]"));
  expect_numbers(folder.path());
  EXPECT_EQ(open_source(folder.path()).manifest.find("w")->sizes, (Sizes{5, 2}));
}

TEST(Source, ShardsThatDoNotFitTogether) {
  const NewFolder folder;
  write_shard(folder, 1, numbers().narrow(0, 0, 4), offsets("[0,0]"));
  struct Bad {
    at::Tensor piece;
    std::string info;
    const char* says;
  };
  const Bad bad[] = {
      {numbers().narrow(0, 4, 1), offsets("[3,0]"), "pieces [0:4, 0:2] and [3:4, 0:2] both have [3:4, 0:2]"},
      {numbers().narrow(0, 4, 1), offsets("[5,0]"), "do not make it up: nobody has [4:5, 0:2]"},
      {numbers().narrow(0, 4, 1), offsets("[4]"), "DCP_SHARDING_INFO of 'w' has 1 offsets for 2 dims"},
      {numbers().narrow(0, 4, 1), offsets("[-4,0]"), "DCP_SHARDING_INFO of 'w' begins at -4"},
      {numbers().narrow(0, 4, 1), offsets("[9223372036854775807,0]"), "begins at 9223372036854775807"},
      {numbers().narrow(0, 4, 1), offsets("{}"), "DCP_SHARDING_INFO of 'w': an array was expected, and {} is there"},
      {numbers().narrow(0, 4, 1), "{}", "DCP_SHARDING_INFO of 'w' is missing"},
      {numbers().narrow(0, 4, 1), "x", "DCP_SHARDING_INFO is no JSON"},
      {at::ones({1}), offsets("[4]"),
       "'w' is Float of 2 dims in shard-00001-model-00001-of-00001.safetensors and Float"},
      {at::ones({1, 2}, at::kHalf), offsets("[4,0]"), "and Half of 2 dims in shard-00002"},
  };
  for (const auto& row : bad) {
    write_shard(folder, 2, row.piece, row.info);
    EXPECT_ERROR(UsageError, open_source(folder.path()), row.says);
  }
}

TEST(Source, WhatIsNoCheckpoint) {
  const NewFolder folder;
  EXPECT_ERROR(UsageError, open_source(folder / "nowhere"), "there is no checkpoint '", "nowhere'");
  EXPECT_ERROR(UsageError, open_source(folder.path()), "is no checkpoint: there is no tessera.json, no model.safetens");
  fs::create_directory(folder / "step-10");
  write(folder / "step-10/tessera.json", "{}");
  EXPECT_ERROR(UsageError, open_source(folder.path()), "but there is '", "step-10'");
}

}  // namespace
}  // namespace tessera::dcp
