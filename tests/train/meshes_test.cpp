// The same training on any mesh: the same weights to start with, to the bit, and the same losses.
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/train/detail/check_replicas.h"
#include "tessera/train/plan.h"
#include "tests/train/tiny_run.h"

namespace tessera::train {
namespace {

std::string samples_bytes_and_traffic(const std::string& line) { return line.substr(line.find("\"samples_read\"")); }

// What metrics.jsonl is to say of them.
std::string planned(TrainConfig config, const std::string& mesh, int64_t samples) {
  config.parallel.mesh = mesh;
  const auto plan = plan_training(config, ranks_of(config.parallel));
  return samples_bytes_and_traffic(json_line(StepMetrics{
      .samples_read = samples, .parameter_bytes = plan.parameter_bytes, .traffic = plan.traffic_by_axis()}));
}

TEST(Meshes, TheSameWeightsAndLosses) {
  const auto alone = run(tiny(), "");
  EXPECT_LT(alone.losses.back(), 0.7 * alone.losses.front());  // it learns: the losses are not just all alike
  EXPECT_EQ(alone.samples_read, 400);
  for (const std::string mesh : {"dp=2", "dp=4", "tp=2", "dp=2,tp=2", "fsdp=4", "fsdp=2,tp=2", "dp=2,fsdp=2"}) {
    SCOPED_TRACE(mesh);
    const auto did = run(tiny(), mesh);
    expect_same(did, alone);
    EXPECT_EQ(samples_bytes_and_traffic(did.line), planned(tiny(), mesh, alone.samples_read));
  }
}

TEST(Meshes, OfLlamaToo) {
  auto config = tiny();
  config.model = {
      .name = "llama-tiny", .max_seq_len = 16, .layers = 2, .heads = 4, .kv_heads = 2, .dim = 16, .ffn_dim = 24};
  config.training.steps = 10;
  const auto alone = run(config, "");
  for (const std::string mesh : {"dp=2,tp=2", "fsdp=2,tp=2"}) {
    SCOPED_TRACE(mesh);
    expect_same(run(config, mesh), alone);
  }
}

TEST(Meshes, WaysToComputeTheSameThing) {
  auto config = tiny();
  config.training.steps = 10;
  const auto alone = run(config, "");
  const auto with = [&](auto change) {
    auto changed = config;
    change(changed);
    return changed;
  };
  expect_same(run(with([](auto& c) { c.training.accumulate = 2; }), ""), alone);
  expect_same(run(with([](auto& c) { c.training.accumulate = 2; }), "dp=2"), alone);
  expect_same(run(with([](auto& c) { c.training.accumulate = 2; }), "fsdp=2,tp=2"), alone);
  expect_same(run(with([](auto& c) { c.training.activation_checkpoint = true; }), "dp=2,tp=2"), alone);
  expect_same(run(with([](auto& c) { c.parallel.sequence_parallel = true; }), "dp=2,tp=2"), alone);
  expect_same(run(with([](auto& c) { c.parallel.loss_parallel = true; }), "dp=2,tp=2"), alone);
  expect_same(run(with([](auto& c) { c.parallel.fsdp = true; }), "dp=2"), alone);
}

// Each in its own way wrong, so that the comparison above is known to see it.
TEST(Meshes, ARankWithoutGradientIsNoticed) {
  auto config = tiny();
  config.training.steps = 3;
  const auto alone = run(config, "");
  for (const std::string mesh : {"dp=2", "tp=2"}) {
    SCOPED_TRACE(mesh);
    auto unguarded = config;
    unguarded.guard.checksum_every = 0;
    const auto zeroed = run(unguarded, mesh, [](Trainer& trainer, const Rank& me) {
      if (me.rank != 1) return;
      for (const auto& p : trainer.model().module().parameters())
        p.register_hook([](const at::Tensor& gradient) { return gradient * 0; });
    });
    EXPECT_NEAR(zeroed.losses[0], alone.losses[0], 1e-5 * alone.losses[0]);  // nothing was updated yet
    EXPECT_GT(std::abs(zeroed.losses[2] - alone.losses[2]), 1e-4 * alone.losses[2]);
  }
}

TEST(Meshes, TrafficAndMemoryAreThoseOfTheMesh) {
  auto config = tiny();
  config.training.steps = 2;
  const auto alone = run(config, ""), copied = run(config, "dp=2"), cut = run(config, "fsdp=2"),
             tensor = run(config, "tp=2");
  EXPECT_TRUE(alone.traffic.empty());
  const int64_t bytes = alone.parameter_bytes.at(0);
  EXPECT_EQ(bytes, 4 * models::parameter_count(model_config(config.model)));
  EXPECT_EQ(copied.parameter_bytes, (std::vector<int64_t>{bytes, bytes}));
  EXPECT_EQ(copied.traffic.size(), 1u);
  EXPECT_EQ(copied.traffic.at("dp").bytes, bytes);  // each gradient once
  EXPECT_EQ(cut.parameter_bytes[0] + cut.parameter_bytes[1], bytes);
  EXPECT_GE(cut.traffic.at("fsdp").bytes, 2 * bytes);
  EXPECT_LT(tensor.parameter_bytes[0], bytes);
  // Forward: embedding, two a block, logits. Backward: the head, two a block. And one for the norm of what is cut.
  EXPECT_EQ(tensor.traffic.at("tp").collectives, 1 + 2 * 2 + 1 + 1 + 2 * 2 + 1);
}

TEST(Checksum, FindsARankThatHasDrifted) {
  auto config = tiny();
  config.parallel.mesh = "dp=2,tp=2";
  run_ranks(4, [&](Rank& me) {
    Trainer trainer(config, me.world);
    const auto compare = [&] { check_replicas(trainer.model().module(), trainer.model().mesh(), "now"); };
    EXPECT_NO_THROW(compare());
    if (me.rank == 3) {
      const at::NoGradGuard no_grad;
      auto weight = trainer.model().module().named_parameters()["h.1.mlp.c_fc.weight"];
      DTensor(weight.detach()).to_local()[0][0] += 1e-6;
    }
    const bool beside = me.rank % 2 == 1;  // in the column of rank 3
    const auto said = testing::message_of<CommError>(compare);
    EXPECT_SAYS(
        said,
        beside
            ? "now, ranks have drifted apart: 1 of 28 parameters that should be the same on all ranks of axis 'dp' are "
              "not: h.1.mlp.c_fc.weight"
            : "parameters of other ranks differ");
  });
}

}  // namespace
}  // namespace tessera::train
