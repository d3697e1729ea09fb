// Training gives the same losses on any mesh, from bit-identical initial weights.
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/train/detail/check_replicas.h"
#include "tessera/train/plan.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

std::string samples_bytes_and_traffic(const std::string& line) { return line.substr(line.find("\"samples_read\"")); }

// The end of the line of metrics.jsonl that plan_training() predicts.
std::string predicted(TrainConfig config, const std::string& mesh, int64_t samples) {
  config.parallel.mesh = mesh;
  const auto plan = plan_training(config, ranks_of(config.parallel));
  return samples_bytes_and_traffic(json_line(StepMetrics{
      .samples_read = samples, .parameter_bytes = plan.parameter_bytes, .traffic = plan.traffic_by_axis()}));
}

TEST(Meshes, GptHasEqualWeightsAndLosses) {
  const auto one_rank = run(tiny(), "");
  EXPECT_LT(one_rank.losses.back(), 0.7 * one_rank.losses.front());  // it learns: equal losses are not trivial
  EXPECT_EQ(one_rank.samples_read, 400);
  for (const std::string mesh : {"dp=2", "dp=4", "tp=2", "dp=2,tp=2", "fsdp=4", "fsdp=2,tp=2", "dp=2,fsdp=2"}) {
    SCOPED_TRACE(mesh);
    const auto result = run(tiny(), mesh);
    expect_same(result, one_rank);
    EXPECT_EQ(samples_bytes_and_traffic(result.line), predicted(tiny(), mesh, one_rank.samples_read));
  }
}

TEST(Meshes, LlamaHasEqualWeightsAndLosses) {
  auto config = tiny();
  config.model = {
      .name = "llama-tiny", .max_seq_len = 16, .layers = 2, .heads = 4, .kv_heads = 2, .dim = 16, .ffn_dim = 24};
  config.training.steps = 10;
  const auto one_rank = run(config, "");
  expect_same_on({"dp=2,tp=2", "fsdp=2,tp=2"}, config, one_rank);
}

TEST(Meshes, OptionsThatDoNotChangeTheResult) {
  auto config = tiny();
  config.training.steps = 10;
  const auto one_rank = run(config, "");
  const auto with = [&](auto change) {
    auto changed = config;
    change(changed);
    return changed;
  };
  expect_same(run(with([](auto& c) { c.training.accumulate = 2; }), ""), one_rank);
  expect_same(run(with([](auto& c) { c.training.accumulate = 2; }), "dp=2"), one_rank);
  expect_same(run(with([](auto& c) { c.training.accumulate = 2; }), "fsdp=2,tp=2"), one_rank);
  expect_same(run(with([](auto& c) { c.training.activation_checkpoint = true; }), "dp=2,tp=2"), one_rank);
  expect_same(run(with([](auto& c) { c.parallel.sequence_parallel = true; }), "dp=2,tp=2"), one_rank);
  expect_same(run(with([](auto& c) { c.parallel.loss_parallel = true; }), "dp=2,tp=2"), one_rank);
  expect_same(run(with([](auto& c) { c.parallel.fsdp = true; }), "dp=2"), one_rank);
}

// Shows that the comparison above detects a rank without gradients.
TEST(Meshes, ARankWithoutGradientsChangesTheLosses) {
  auto config = tiny();
  config.training.steps = 3;
  const auto one_rank = run(config, "");
  for (const std::string mesh : {"dp=2", "tp=2"}) {
    SCOPED_TRACE(mesh);
    auto unguarded = config;
    unguarded.guard.checksum_every = 0;
    const auto zeroed = run(unguarded, mesh, [](Trainer& trainer, const Rank& me) {
      if (me.rank != 1) return;
      for (const auto& p : trainer.model().module().parameters())
        p.register_hook([](const at::Tensor& gradient) { return gradient * 0; });
    });
    EXPECT_NEAR(zeroed.losses[0], one_rank.losses[0], 1e-5 * one_rank.losses[0]);  // before the first update
    EXPECT_GT(std::abs(zeroed.losses[2] - one_rank.losses[2]), 1e-4 * one_rank.losses[2]);
  }
}

TEST(Meshes, TrafficAndParameterBytesFitTheMesh) {
  auto config = tiny();
  config.training.steps = 2;
  const auto one_rank = run(config, ""), replicated = run(config, "dp=2"), sharded = run(config, "fsdp=2"),
             tensor_parallel = run(config, "tp=2");
  EXPECT_TRUE(one_rank.traffic.empty());
  const int64_t bytes = one_rank.parameter_bytes.at(0);
  EXPECT_EQ(bytes, 4 * models::parameter_count(model_config(config.model)));
  EXPECT_EQ(replicated.parameter_bytes, (std::vector<int64_t>{bytes, bytes}));
  EXPECT_EQ(replicated.traffic.size(), 1u);
  EXPECT_EQ(replicated.traffic.at("dp").bytes, bytes);  // each gradient once
  EXPECT_EQ(sharded.parameter_bytes[0] + sharded.parameter_bytes[1], bytes);
  EXPECT_GE(sharded.traffic.at("fsdp").bytes, 2 * bytes);
  EXPECT_LT(tensor_parallel.parameter_bytes[0], bytes);
  // Forward: embedding, two per block, logits. Backward: the head, two per block. One for the gradient norm.
  EXPECT_EQ(tensor_parallel.traffic.at("tp").collectives, 1 + 2 * 2 + 1 + 1 + 2 * 2 + 1);
}

TEST(CheckReplicas, FindsADifferingRank) {
  auto config = tiny();
  config.parallel.mesh = "dp=2,tp=2";
  run_ranks(4, [&](Rank& me) {
    Trainer trainer(config, me.world);
    const auto compare = [&] { check_replicas(trainer.model(), "now"); };
    EXPECT_NO_THROW(compare());
    if (me.rank == 3) {
      const at::NoGradGuard no_grad;
      auto weight = trainer.model().module().named_parameters()["h.1.mlp.c_fc.weight"];
      DTensor(weight.detach()).to_local()[0][0] += 1e-6;
    }
    const bool compares_with_rank_3 = me.rank % 2 == 1;  // in the same dp group
    const auto said = testing::error_message<CommError>(compare);
    EXPECT_CONTAINS(said,
                    compares_with_rank_3
                        ? "now: 1 of 28 replicated parameters differ between ranks of axis 'dp': h.1.mlp.c_fc.weight"
                        : "now: replicated parameters differ between other ranks");
  });
}

}  // namespace
}  // namespace tessera::train
