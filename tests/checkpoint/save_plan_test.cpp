// The assignment of boxes to ranks, and the manifest.
#include "tessera/checkpoint/detail/save_plan.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <set>

namespace tessera::dcp {
namespace {

Box rows(int64_t begin, int64_t end) { return {{begin}, {end - begin}}; }

SavedTensor tensor(const std::string& name, int64_t size, std::vector<Box> boxes, c10::ScalarType dtype = c10::kFloat) {
  SavedTensor tensor{name, dtype, {size}, {}};
  for (auto& box : boxes) tensor.shards.push_back({"", std::move(box), {}});
  return tensor;
}

Manifest local_manifest(std::vector<SavedTensor> tensors) { return {{}, std::move(tensors)}; }

TEST(SavePlan, EachBoxIsWrittenOnceAndReplicasShareTheWork) {
  const auto top = local_manifest({tensor("w", 4, {rows(0, 2)}), tensor("b", 1, {rows(0, 1)})});
  const auto bottom = local_manifest({tensor("w", 4, {rows(2, 4)}), tensor("b", 1, {rows(0, 1)})});
  const auto plan = plan_save({top, bottom, top, bottom});
  ASSERT_EQ(plan.tensors.size(), 2u);
  EXPECT_EQ(plan.tensors[0].shards,
            (std::vector<SavedShard>{{"shard-00001-model-00001-of-00001.safetensors", rows(0, 2), {}},
                                     {"shard-00002-model-00001-of-00001.safetensors", rows(2, 4), {}}}));
  EXPECT_EQ(plan.tensors[1].shards,
            (std::vector<SavedShard>{{"shard-00003-model-00001-of-00001.safetensors", rows(0, 1), {}}}));
}

TEST(SavePlan, RanksWriteSimilarAmounts) {
  std::vector<SavedTensor> tensors;
  for (int64_t i = 0; i < 40; i++) tensors.push_back(tensor(c10::str("t", i), 100 + 7 * i, {rows(0, 100 + 7 * i)}));
  const auto plan = plan_save(std::vector<Manifest>(4, local_manifest(tensors)));
  std::map<std::string, int64_t> elements;
  for (const auto& t : plan.tensors) elements[t.shards.at(0).file] += t.sizes[0];
  ASSERT_EQ(elements.size(), 4u);
  for (const auto& [file, count] : elements) EXPECT_NEAR(static_cast<double>(count), 9460.0 / 4, 120) << file;
}

TEST(SavePlan, SecondBoxOfATensorGoesIntoASecondFile) {
  const auto plan = plan_save({local_manifest({tensor("w", 8, {rows(0, 2), rows(4, 6)}), tensor("b", 1, {rows(0, 1)})}),
                               local_manifest({tensor("w", 8, {rows(2, 4), rows(6, 8)})})});
  std::vector<std::string> files;
  for (const auto& shard : plan.tensors[0].shards) files.push_back(shard.file);
  EXPECT_EQ(files,
            (std::vector<std::string>{
                "shard-00001-model-00001-of-00002.safetensors", "shard-00001-model-00002-of-00002.safetensors",
                "shard-00002-model-00001-of-00002.safetensors", "shard-00002-model-00002-of-00002.safetensors"}));
  EXPECT_TRUE(writes(1, files[2]));
  EXPECT_FALSE(writes(0, files[2]));
}

TEST(SavePlan, FileNamesOfMoreThan99999Ranks) {
  const auto plan = plan_save(std::vector<Manifest>(123456, local_manifest({})));
  EXPECT_TRUE(plan.tensors.empty());
  EXPECT_TRUE(writes(99999, "shard-100000-model-00001-of-00001.safetensors"));
  EXPECT_FALSE(writes(9999, "shard-100000-model-00001-of-00001.safetensors"));
}

TEST(SavePlan, MismatchesBetweenRanksAreErrors) {
  EXPECT_ERROR(UsageError, plan_save({local_manifest({tensor("w", 4, {})}), local_manifest({tensor("w", 5, {})})}),
               "'w' is Float[4] on rank 0 and Float[5] on rank 1");
  EXPECT_ERROR(UsageError,
               plan_save({local_manifest({tensor("w", 4, {})}), local_manifest({}),
                          local_manifest({tensor("w", 4, {}, c10::kHalf)})}),
               "'w' is Float[4] on rank 0 and Half[4] on rank 2");
  EXPECT_ERROR(
      UsageError,
      plan_save({local_manifest({tensor("w", 4, {rows(0, 4)})}), local_manifest({tensor("w", 4, {rows(0, 2)})})}),
      "the shards of 'w' [4] do not cover it exactly once: shards [0:4] and [0:2] overlap in [0:2]");
  EXPECT_ERROR(UsageError, plan_save({local_manifest({tensor("w", 4, {rows(0, 3)})})}), "no shard has [3:4]");
}

TEST(Manifest, ParsesWhatItPrints) {
  Manifest manifest{{{"step", int64_t{10}}, {"lr", 0.1}, {"integral", 2.0}, {"name", std::string("gpt \"tiny\"")}},
                    {tensor("w", 4, {rows(0, 3), rows(3, 4)}), tensor("b", 0, {rows(0, 0)}, c10::kBFloat16)}};
  manifest.tensors[0].shards[0] = {"a.safetensors", rows(0, 3), 0xffffffffu};
  EXPECT_EQ(Manifest::parse(manifest.to_json(), "it"), manifest);
  EXPECT_EQ(manifest.find("b"), &manifest.tensors[1]);
  EXPECT_EQ(manifest.find("c"), nullptr);
}

TEST(Manifest, ParseErrorsNameTheProblem) {
  struct ErrorCase {
    const char *text, *message;
  };
  const ErrorCase cases[] = {
      {"", "JSON"},
      {"{}", "it: there is no 'tessera_checkpoint'"},
      {R"({"tessera_checkpoint":3})", "it: the format version is 3, and this library reads versions 1 and 2"},
      {R"({"tessera_checkpoint":2,"values":{},"tensors":{}})", "it: it has no checksum, so it is damaged"},
      {R"({"tessera_checkpoint":2,"values":{},"tensors":{},"crc32c":7})", "it: it is damaged: the checksum is "},
      {R"({"tessera_checkpoint":1,"values":{},"tensors":{},"crc32c":7})",
       "'crc32c' is not a member of format version 1"},
      {R"({"tessera_checkpoint":1,"values":{"a":[]}})", "it: value 'a': "},
      {R"({"tessera_checkpoint":1,"values":{},"tensors":{"w":{}}})", "it: tensor 'w': there is no 'dtype'"},
      {R"({"tessera_checkpoint":1,"values":{},"tensors":{"w":{"dtype":"F32","shape":[-1],"pieces":[]}}})",
       "-1 is not a valid size"},
      {R"({"tessera_checkpoint":1,"values":{},"tensors":{"w":{"dtype":"F32","shape":[1],"pieces":[{"file":"../x",)"
       R"("offsets":[0],"sizes":[1]}]}}})",
       "file '../x' is in another folder"},
      {R"({"tessera_checkpoint":1,"values":{},"tensors":{"w":{"dtype":"F32","shape":[1],"pieces":[{"file":"x",)"
       R"("offsets":[0],"sizes":[]}]}}})",
       "a shard has 1 offsets and 0 sizes"},
  };
  for (const auto& each : cases) EXPECT_ERROR(UsageError, Manifest::parse(each.text, "it"), each.message);
}

}  // namespace
}  // namespace tessera::dcp
