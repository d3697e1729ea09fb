// load_safetensors: weights of other programs into a module, with a key map and a report.
#include "new_folder.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/safetensors_file.h"
#include "tessera/data_parallel/fsdp/fully_shard.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"
#include "tests/fixtures/full_tensor.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace tessera::dcp {
namespace {

using testing::Rank;
using testing::run_ranks;

at::Tensor file_weight() { return at::arange(15, at::kFloat).view({5, 3}); }
std::string write_weights(const NewFolder& folder) {
  const auto path = folder / "w.safetensors";
  write_safetensors(path, {{"transformer.0.weight", file_weight()},
                           {"transformer.0.bias", at::ones({5}, at::kHalf)},
                           {"lm_head.weight", at::ones({2})}});
  return path;
}
const std::vector<KeyRule> kMap{{"transformer\\.(.*)", "$1"}, {"lm_head\\..*", ""}};

TEST(LoadSafetensors, IntoAPlainModuleWithoutAWorld) {
  const NewFolder folder;
  const auto path = write_weights(folder);
  torch::nn::Sequential model(torch::nn::Linear(3, 5));
  EXPECT_TRUE(load_safetensors(*model, path, {.key_map = kMap}).empty());
  EXPECT_TRUE(model->named_parameters()["0.weight"].equal(file_weight()));
  EXPECT_EQ(model->named_parameters()["0.bias"].scalar_type(), at::kFloat) << "the parameter keeps its dtype";
}

TEST(LoadSafetensors, IntoShardsOfSeveralRanks) {
  const NewFolder folder;
  const auto path = write_weights(folder);
  run_ranks(2, [&](Rank& me) {
    nn::Sequential model(nn::Linear(3, 5));
    fully_shard(model, {.mesh = me.mesh("dp=2")});
    EXPECT_TRUE(load_safetensors(*model, path, {.key_map = kMap}).empty());
    EXPECT_TRUE(fixtures::full_tensor(model->named_parameters()["0.weight"]).equal(file_weight()));
  });
}

TEST(LoadSafetensors, ReportsWhatDoesNotFit) {
  const NewFolder folder;
  const auto path = write_weights(folder);
  torch::nn::Sequential model(torch::nn::Linear(3, 4));
  const auto before = model->named_parameters()["0.weight"].detach().clone();
  EXPECT_ERROR(UsageError, load_safetensors(*model, path, {.key_map = kMap}), "wrong shape: 0.weight is [4, 3] here");
  EXPECT_ERROR(UsageError, load_safetensors(*model, path), "missing from the checkpoint: 0.weight",
               "only in the checkpoint: transformer.0.weight");
  const auto report = load_safetensors(*model, path, {.key_map = {{"transformer\\.(.*)", "$1"}}, .strict = false});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"lm_head.weight"});
  EXPECT_EQ(report.mismatched.size(), 2u);
  EXPECT_TRUE(model->named_parameters()["0.weight"].equal(before)) << "nothing has changed";
}

TEST(LoadSafetensors, WrongKeyMapsAreErrors) {
  const NewFolder folder;
  const auto path = write_weights(folder);
  torch::nn::Sequential model(torch::nn::Linear(3, 5));
  EXPECT_ERROR(UsageError, load_safetensors(*model, path, {.key_map = {{"(", "x"}}}),
               "'(' of the key map is not a regular");
  EXPECT_ERROR(UsageError, load_safetensors(*model, path, {.key_map = {{".*", "x"}}}), "are both 'x' after renaming");
}

}  // namespace
}  // namespace tessera::dcp
