// plan_training() predicts what a trainer does. meshes_test.cpp checks the default options, this file the others.
#include "tessera/train/plan.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tests/train/tiny_run.h"

#include <chrono>
#include <sstream>

namespace tessera::train {

std::ostream& operator<<(std::ostream& out, const Traffic& t) {
  return out << t.collectives << " collectives, " << t.bytes << " bytes";
}

namespace {

void expect_as_planned(TrainConfig config, const std::string& mesh) {
  SCOPED_TRACE(mesh);
  config.training.steps = 2;  // the reducer rebuilds its buckets after the first step
  config.parallel.mesh = mesh;
  const auto plan = plan_training(config, std::max<int64_t>(1, ranks_of(config.parallel)));
  const auto result = run(config, mesh);
  EXPECT_EQ(plan.parameter_bytes, result.parameter_bytes);
  EXPECT_EQ(plan.traffic_by_axis(), result.traffic);
}

TEST(TrainPlan, PredictsOtherModelsAndOptions) {
  const auto with = [](auto change) {
    auto changed = tiny();
    change(changed);
    return changed;
  };
  expect_as_planned(with([](auto& c) { c.model.layers = 4; }), "fsdp=2,tp=2");
  expect_as_planned(with([](auto& c) { c.parallel.sequence_parallel = true; }), "dp=2,tp=2");
  expect_as_planned(with([](auto& c) { c.parallel.loss_parallel = true; }), "dp=2,tp=2");
  expect_as_planned(with([](auto& c) { c.training.accumulate = 2; }), "fsdp=2,tp=2");
  expect_as_planned(with([](auto& c) { c.training.activation_checkpoint = true; }), "fsdp=2,tp=2");
  expect_as_planned(with([](auto& c) { c.training.precision = "bf16"; }), "fsdp=2,tp=2");
  expect_as_planned(with([](auto& c) { c.training.precision = "bf16"; }), "dp=2,tp=2");
  expect_as_planned(with([](auto& c) { c.training.precision = "fp16"; }), "fsdp=2,tp=2");
  const ModelOptions llama{
      .name = "llama-tiny", .max_seq_len = 16, .layers = 3, .heads = 4, .kv_heads = 2, .dim = 16, .ffn_dim = 24};
  expect_as_planned(with([&](auto& c) { c.model = llama; }), "dp=2,tp=2");
  // A vocabulary that is not divisible by tp.
  expect_as_planned(with([&](auto& c) { c.model.vocab_size = 101; }), "tp=2");
  expect_as_planned(with([&](auto& c) { c.model = llama, c.model.vocab_size = 101, c.parallel.loss_parallel = true; }),
                    "dp=2,tp=2");
  expect_as_planned(with([&](auto& c) { c.model = llama, c.parallel.sequence_parallel = true; }), "tp=2");
  expect_as_planned(with([&](auto& c) { c.model = llama, c.training.batch = 9; }), "fsdp=3");
}

TEST(TrainPlan, PredictsSeveralBuckets) {
  auto config = tiny();
  config.model = {.name = "gpt-tiny", .vocab_size = 3000, .max_seq_len = 16, .layers = 5, .heads = 2, .dim = 128};
  EXPECT_GT(
      [&] {
        auto on_two = config;
        on_two.parallel.mesh = "dp=2";
        return plan_training(on_two, 2).traffic_by_axis().at("dp").collectives;
      }(),
      1);
  expect_as_planned(config, "dp=2");
}

TEST(TrainPlan, PlansAThousandRanksInSeconds) {
  TrainConfig config;
  config.model.name = "gpt2-124m";
  config.data.path = "tokens.bin";  // is not opened
  config.parallel.mesh = "dp=16,fsdp=16,tp=4";
  config.training.batch = 1024;
  const auto start = std::chrono::steady_clock::now();
  const auto plan = plan_training(config, 1024);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  ASSERT_EQ(plan.parameter_bytes.size(), 1024u);
  std::ostringstream text;
  text << plan;
  EXPECT_CONTAINS(text.str(), "h.*.attn.c_attn.weight");
  EXPECT_CONTAINS(text.str(), "on 1024 ranks, mesh dp=16,fsdp=16,tp=4");
  EXPECT_CONTAINS(text.str(), "all_gather of parameters");
  EXPECT_CONTAINS(text.str(), "activations");
  config.model.name = "llama-70b";
  config.parallel.mesh = "dp=16,fsdp=8,tp=8";
  const auto then = std::chrono::steady_clock::now();
  plan_training(config, 1024);
  EXPECT_LT(std::chrono::steady_clock::now() - then, std::chrono::seconds(5));
}

TEST(TrainPlan, ListsAllConfigErrors) {
  auto config = tiny();
  EXPECT_TRUE(config_errors(config, 4).empty());
  config.parallel.mesh = "dp=3,tp=4";
  const auto errors = config_errors(config, 12);
  ASSERT_EQ(errors.size(), 2u);
  EXPECT_CONTAINS(errors[0], "a batch of 8 samples is not divisible by 3 data-parallel ranks");
  EXPECT_CONTAINS(errors[1], "gpt-tiny has 2 heads, which are not divisible by tp=4");
  EXPECT_ERROR(UsageError, plan_training(config, 12), "a batch of 8");
  ASSERT_EQ(config_errors(config, 8).size(), 1u);
  EXPECT_CONTAINS(config_errors(config, 8)[0], "needs 12 ranks, but there are 8");
  EXPECT_ERROR(UsageError, plan_training(config, 0), "at least 1");
}

}  // namespace
}  // namespace tessera::train
