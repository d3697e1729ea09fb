// Python reads our checkpoints, and we read Python's.
#include "ask_python.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <filesystem>

namespace tessera::dcp {
namespace {

using testing::Rank;
using testing::run_ranks;

struct Row {
  const char* name;
  at::Tensor value;
  Placements placements;  // on 2 x 2 ranks; none: plain
};

std::vector<Row> rows() {
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

struct Folder {
  std::string path = "/tmp/tessera-parity-checkpoint-XXXXXX";
  Folder() {
    if (!mkdtemp(path.data())) throw std::runtime_error("cannot make the folder " + path);
    std::filesystem::create_directory(path + "/theirs");
  }
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
  }
};

const Folder& folder() {
  static const Folder made;
  return made;
}

const parity::Answer& python() {
  static const auto answer = [] {
    run_ranks(4, [](Rank& me) {
      const auto mesh = me.mesh("dp=2,tp=2");
      StateDict dict;
      for (const auto& row : rows())
        dict.insert(row.name, row.placements.empty()
                                  ? row.value.clone()
                                  : distribute_tensor(row.value.clone(), mesh, row.placements, {.src_data_rank = {}}));
      save(dict, folder().path + "/ours", {{"step", 1}});
    });
    parity::Message question;
    question.texts = {{"ours", folder().path + "/ours"}, {"theirs", folder().path + "/theirs"}};
    for (const auto& row : rows()) question.tensors[std::string("theirs/") + row.name] = row.value;
    auto found = parity::ask_python("checkpoint.py", question);
    if (found.texts.count("skipped")) found.skipped = "Python has not all packages: " + found.texts.at("skipped");
    return found;
  }();
  return answer;
}

TEST(CheckpointParity, PythonReadsOurs) {
  SKIP_UNLESS_ANSWERED(python());
  for (const std::string reader : {"safetensors/", "dcp/"})
    for (const auto& row : rows()) {
      const auto found = python().tensors.find(reader + row.name);
      ASSERT_NE(found, python().tensors.end()) << reader << row.name;
      EXPECT_EQ(found->second.scalar_type(), row.value.scalar_type()) << reader << row.name;
      EXPECT_TRUE(found->second.equal(row.value)) << reader << row.name;
    }
}

TEST(CheckpointParity, WeReadPythons) {
  SKIP_UNLESS_ANSWERED(python());
  for (const std::string form : {"one.safetensors", "index", "whole", "shards"})
    run_ranks(2, [&](Rank& me) {
      const auto mesh = me.mesh("dp=2");
      StateDict dict;
      for (const auto& row : rows())
        dict.insert(row.name, row.value.dim() == 0 ? at::zeros_like(row.value)
                                                   : zeros(row.value.sizes(), mesh, {Shard(0)},
                                                           at::TensorOptions(row.value.scalar_type())));
      load(dict, folder().path + "/theirs/" + form);
      for (const auto& row : rows()) {
        const auto& found = dict.at(row.name);
        const auto whole = is_dtensor(found) ? DTensor(found).full_tensor() : found;
        EXPECT_TRUE(whole.equal(row.value)) << form << " " << row.name;
      }
    });
}

}  // namespace
}  // namespace tessera::dcp
