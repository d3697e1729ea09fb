// Python reads checkpoints of Tessera, and Tessera reads checkpoints of Python.
#include "run_python.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/detail/distcp.h"
#include "tessera/checkpoint/detail/shard_reader.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/full_tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>

namespace tessera::dcp {
namespace {

using testing::Rank;
using testing::run_ranks;

struct SavedTensor {
  const char* name;
  at::Tensor value;
  Placements placements;  // on 2 x 2 ranks; empty: plain
};

std::vector<SavedTensor> saved_tensors() {
  const auto numbers = [](at::IntArrayRef sizes, at::ScalarType dtype = at::kFloat) {
    return at::arange(c10::multiply_integers(sizes), at::kFloat).sin().mul(100).to(dtype).view(sizes);
  };
  const auto r = Replicate();
  return {{"model.uneven", numbers({7, 5}), {Shard(1), Shard(0)}},
          {"model.twice", numbers({9, 2}), {Shard(0), Shard(0)}},
          {"model.strided", numbers({11, 3}), {StridedShard(0, 2), r}},
          {"model.replicated", numbers({3, 3}), {r, r}},
          {"model.bf16", numbers({5, 3}, at::kBFloat16), {Shard(1), r}},
          {"model.long", numbers({5}, at::kLong), {r, Shard(0)}},
          {"model.bool", numbers({5, 2}).gt(0), {Shard(0), Shard(1)}},
          {"optimizer.step", at::scalar_tensor(2.5, at::kDouble), {}}};
}

struct CheckpointFolder {
  std::string path = "/tmp/tessera-parity-checkpoint-XXXXXX";
  CheckpointFolder() {
    if (!mkdtemp(path.data())) throw std::runtime_error("cannot create the folder " + path);
    std::filesystem::create_directory(path + "/theirs");
  }
  ~CheckpointFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

const CheckpointFolder& folder() {
  static const CheckpointFolder made;
  return made;
}

const parity::Response& python() {
  static const auto response = [] {
    run_ranks(4, [](Rank& me) {
      const auto mesh = me.mesh("dp=2,tp=2");
      StateDict dict;
      for (const auto& saved : saved_tensors())
        dict.insert(saved.name, saved.placements.empty() ? saved.value.clone()
                                                         : distribute_tensor(saved.value.clone(), mesh,
                                                                             saved.placements, {.src_data_rank = {}}));
      save(dict, folder().path + "/ours", {{"step", 1}, {"lr", 0.25}, {"note", "text"}});
    });
    const auto ours = open_source(folder().path + "/ours");
    ShardReader reader(ours.folder);
    write_distcp(ours.manifest, folder().path + "/ours_distcp",
                 [&](const auto& tensor, const auto& shard) { return reader.read(tensor, shard, true); });
    parity::Message request;
    request.texts = {{"ours", folder().path + "/ours"},
                     {"ours_distcp", folder().path + "/ours_distcp"},
                     {"theirs", folder().path + "/theirs"}};
    for (const auto& saved : saved_tensors()) request.tensors[std::string("theirs/") + saved.name] = saved.value;
    auto found = parity::run_python("checkpoint.py", request);
    if (found.texts.count("skipped")) found.skipped = "Python packages are missing: " + found.texts.at("skipped");
    return found;
  }();
  return response;
}

TEST(CheckpointParity, PythonReadsOurCheckpoints) {
  SKIP_WITHOUT_PYTHON(python());
  EXPECT_EQ(python().texts.at("values"), "{'step': 1, 'note': 'text', 'lr': 0.25}");
  for (const std::string reader : {"safetensors/", "dcp/", "distcp/"})
    for (const auto& saved : saved_tensors()) {
      const auto found = python().tensors.find(reader + saved.name);
      ASSERT_NE(found, python().tensors.end()) << reader << saved.name;
      EXPECT_EQ(found->second.scalar_type(), saved.value.scalar_type()) << reader << saved.name;
      EXPECT_TRUE(found->second.equal(saved.value)) << reader << saved.name;
    }
}

TEST(CheckpointParity, WeReadPythonsObjects) {
  SKIP_WITHOUT_PYTHON(python());
  const Values expected{{"step", 7}, {"lr", 0.5}, {"note", "text"}};  // not the dict, which a Value cannot hold
  EXPECT_EQ(read_values(folder().path + "/theirs/distcp"), expected);
}

TEST(CheckpointParity, WeReadPythonsCheckpoints) {
  SKIP_WITHOUT_PYTHON(python());
  for (const std::string form : {"one.safetensors", "index", "consolidated", "shards", "distcp"})
    run_ranks(2, [&](Rank& me) {
      const auto mesh = me.mesh("dp=2");
      StateDict dict;
      for (const auto& saved : saved_tensors())
        dict.insert(saved.name, saved.value.dim() == 0 ? at::zeros_like(saved.value)
                                                       : zeros(saved.value.sizes(), mesh, {Shard(0)},
                                                               at::TensorOptions(saved.value.scalar_type())));
      const bool has_more = form == "distcp";
      if (has_more) dict.insert("view", zeros({3, 2}, mesh, {Shard(0)}));
      load(dict, folder().path + "/theirs/" + form);
      if (has_more) {
        const auto expected = at::arange(12, at::kFloat).view({3, 4}).narrow(1, 1, 2);
        EXPECT_TRUE(fixtures::full_tensor(dict.at("view")).equal(expected));
      }
      for (const auto& saved : saved_tensors()) {
        EXPECT_TRUE(fixtures::full_tensor(dict.at(saved.name)).equal(saved.value)) << form << " " << saved.name;
      }
    });
}

}  // namespace
}  // namespace tessera::dcp
