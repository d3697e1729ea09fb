// Training on meshes with pp, cp and ep has the initial weights and the losses of one rank. `make soak` runs all meshes
// for 20 steps; every test run some of them for 5.
#include "tessera/base/error.h"
#include "tessera/testing/detail/soak.h"
#include "tessera/testing/expect_error.h"
#include "tessera/train/plan.h"
#include "tests/checkpoint/new_folder.h"
#include "tests/train/mesh_cases.h"

#include <sstream>

namespace tessera::train {
namespace {

int64_t steps() { return tessera::testing::long_soak() ? 20 : 5; }

TrainConfig gpt() {
  auto config = tiny();
  config.training.steps = steps();
  config.guard.checksum_every = 2;
  return config;
}
TrainConfig llama() {
  auto config = gpt();
  config.model = {
      .name = "llama-tiny", .max_seq_len = 16, .layers = 4, .heads = 4, .kv_heads = 2, .dim = 16, .ffn_dim = 24};
  return config;
}
TrainConfig mixtral() {
  auto config = llama();
  config.model.name = "mixtral-tiny";
  config.model.layers = 2;
  config.model.experts = 4;
  config.model.aux_loss_weight = 0;  // depends on the tokens of a rank
  return config;
}

void expect_like_one_rank(const TrainConfig& config, const std::vector<MeshCase>& cases) {
  const auto one_rank = run(config, "");
  for_each_case(config, cases, [&](const TrainConfig& changed, const std::string& name) {
    SCOPED_TRACE(name);
    expect_same(run(changed, changed.parallel.mesh), one_rank);
  });
}

TEST(FiveAxes, Gpt) {
  expect_like_one_rank(
      gpt(), {
                 {"pp=2", {}, kInEveryRun},
                 {"pp=2", {{"parallel.pipeline_schedule", "GPipe"}, {"parallel.microbatches", "8"}}},
                 {"pp=2", {{"parallel.pipeline_schedule", "ZBVZeroBubble"}}, kInEveryRun},
                 {"pp=2", {{"parallel.pipeline_schedule", "DualPipeV"}}},
                 {"pp=2", {{"parallel.pipeline_schedule", "LoopedBFS"}}},
                 {"pp=2,dp=2", {{"parallel.pipeline_schedule", "InterleavedZeroBubble"}}},
                 {"pp=2,fsdp=2", {{"parallel.pipeline_schedule", "Interleaved1F1B"}}},
                 {"pp=2,tp=2", {{"parallel.sequence_parallel", "true"}, {"parallel.loss_parallel", "true"}}},
                 {"pp=4"},
                 {"pp=2", {{"parallel.pipeline_schedule", "ZBVZeroBubble"}, {"training.compile", "true"}}, kInEveryRun},
                 {"pp=2,dp=2,tp=2", {{"training.compile", "true"}, {"training.activation_checkpoint", "true"}}},
                 {"cp=2", {}, kInEveryRun},
                 {"cp=4", {{"parallel.context_rotate", "alltoall"}}},
                 {"cp=2", {{"parallel.context_method", "ulysses"}}},
                 {"dp=2,cp=2", {{"training.accumulate", "2"}}},
                 {"fsdp=2,cp=2", {{"training.activation_checkpoint", "true"}}},
                 {"pp=2,cp=2,tp=2", {{"training.activation_checkpoint", "true"}}},
                 {"pp=2,dp=2,fsdp=2"},
                 {"pp=2,dp=2,cp=2,tp=2", {}, kInEveryRun},
             });
}

TEST(FiveAxes, Llama) {
  expect_like_one_rank(
      llama(),
      {
          {"pp=2,fsdp=2", {{"parallel.pipeline_schedule", "ZBVZeroBubble"}}, kInEveryRun},
          {"pp=2,tp=2", {{"parallel.pipeline_schedule", "DualPipeV"}, {"training.activation_checkpoint", "true"}}},
          {"pp=3,dp=2", {{"parallel.microbatches", "4"}}},
          {"pp=4", {{"parallel.pipeline_stages", "4"}}},
          {"cp=2,tp=2", {{"parallel.sequence_parallel", "true"}}},
          {"fsdp=2,cp=4"},
          {"pp=2,fsdp=2,cp=2,tp=2"},
      });
}

TEST(FiveAxes, Mixtral) {
  expect_like_one_rank(mixtral(), {
                                      {"dp=2,ep=2", {}, kInEveryRun},
                                      {"dp=4,ep=2"},
                                      {"fsdp=2,ep=2"},
                                      {"fsdp=4,ep=2"},
                                      {"dp=2,cp=2,ep=4"},
                                      {"tp=2"},
                                      {"dp=2,tp=2,ep=2", {{"parallel.sequence_parallel", "true"}}},
                                      {"pp=2,dp=2,ep=2", {{"parallel.pipeline_schedule", "ZBVZeroBubble"}}},
                                      {"pp=2,fsdp=2,cp=2,tp=2,ep=4", {}, kInEveryRun},
                                  });
}

TEST(FiveAxes, MixedPrecisionLearnsOnEveryAxis) {
  auto config = mixtral();
  config.training.steps = 8;
  for (const std::string precision : {"bf16", "fp16"}) {
    config.training.precision = precision;
    const auto one_rank = run(config, "");
    const auto result = run(config, "pp=2,dp=2,ep=2");
    for (size_t i = 0; i < result.losses.size(); i++)
      EXPECT_NEAR(result.losses[i], one_rank.losses[i], 0.02 * one_rank.losses[i]) << precision << " step " << i + 1;
  }
}

TEST(FiveAxes, RouterStatisticsAreThoseOfAllRanksAndStages) {
  auto config = mixtral();
  config.model.bias_update_rate = 0.01;
  config.training.steps = 2;
  const auto router = [](const TrainRun& run) { return run.line.substr(run.line.find("\"router\"")); };
  const auto one_rank = run(config, "");
  EXPECT_CONTAINS(router(one_rank), "max_load");
  const auto counts = [&](const std::string& mesh) { return router(run(config, mesh)).substr(0, 200); };
  EXPECT_CONTAINS(counts("pp=2,dp=2,ep=2"), router(one_rank).substr(router(one_rank).find("\"dropped\"")));
}

TEST(FiveAxes, CheckpointsLoadOnOtherStagesAndMeshes) {
  auto config = llama();
  config.training.steps = 8;
  config.eval.sample_tokens = 0;
  const dcp::NewFolder folder;
  const auto train = [&](const std::string& mesh, int64_t steps, const std::string& from, const std::string& to) {
    auto changed = config;
    changed.parallel.mesh = mesh;
    changed.checkpoint.resume = from;
    std::vector<double> losses;
    run_ranks(std::max<int64_t>(1, ranks_of(changed.parallel)), [&](Rank& me) {
      Trainer trainer(changed, me.world);
      for (int64_t i = 0; i < steps; i++) {
        const double loss = trainer.step().metrics.loss;
        if (me.rank == 0) losses.push_back(loss);
      }
      if (!to.empty()) trainer.save(to);
    });
    return losses;
  };
  const auto uninterrupted = train("pp=2", 8, "", "");
  train("pp=2", 4, "", folder / "two");
  train("pp=2,fsdp=2", 4, "", folder / "sharded");
  train("dp=2", 4, "", folder / "none");
  train("pp=2,dp=2,fsdp=2", 4, "", folder / "hybrid");
  for (const auto& [from, mesh] : std::vector<std::pair<std::string, std::string>>{{"two", "pp=2"},
                                                                                   {"two", "pp=4"},
                                                                                   {"two", "dp=2"},
                                                                                   {"two", "pp=2,tp=2"},
                                                                                   {"sharded", "pp=3"},
                                                                                   {"none", "pp=2,fsdp=2"},
                                                                                   {"hybrid", "dp=2,fsdp=2"},
                                                                                   {"hybrid", "pp=4"}}) {
    SCOPED_TRACE(from + " on " + mesh);
    const auto resumed = train(mesh, 4, folder / from, "");
    for (size_t i = 0; i < 4; i++) EXPECT_NEAR(resumed[i], uninterrupted[i + 4], 1e-5 * uninterrupted[i + 4]) << i;
    if (from == "two" && mesh == "pp=2") {
      EXPECT_EQ(resumed, std::vector<double>(uninterrupted.begin() + 4, uninterrupted.end()));
    }
  }
}

TEST(FiveAxes, EvaluatesAndGeneratesOnEveryMesh) {
  auto config = gpt();
  config.training.steps = 3;
  config.eval.samples = 16;
  const auto result_on = [&](const std::string& mesh) {
    auto changed = config;
    changed.parallel.mesh = mesh;
    TrainResult result;
    run_ranks(std::max<int64_t>(1, ranks_of(changed.parallel)), [&](Rank& me) {
      const auto mine = Trainer(changed, me.world).run();
      if (me.rank == 0) result = mine;
    });
    return result;
  };
  const auto one_rank = result_on("");
  for (const std::string mesh : {"pp=2", "cp=2", "pp=2,dp=2,cp=2"}) {
    SCOPED_TRACE(mesh);
    const auto result = result_on(mesh);
    EXPECT_NEAR(result.eval.loss, one_rank.eval.loss, 1e-5 * one_rank.eval.loss);
    EXPECT_EQ(result.eval.accuracy, one_rank.eval.accuracy);
    EXPECT_EQ(result.sample, one_rank.sample);
  }
}

TEST(FiveAxes, BadMeshesAreRefusedBeforeAnythingRuns) {
  struct BadConfig {
    std::string mesh;
    std::vector<std::pair<const char*, const char*>> options;
    const char* message;
  };
  for (const auto& each : std::vector<BadConfig>{
           {"pp=2",
            {{"parallel.microbatches", "3"}},
            "not divisible by 3 microbatches; use --microbatches of 1, 2, 4, 8"},
           {"pp=2",
            {{"parallel.pipeline_schedule", "2F2B"}},
            "pipeline schedule '2F2B' is unknown. Write one of GPipe"},
           {"pp=2", {{"training.accumulate", "2"}}, "remove --accumulate"},
           {"pp=2,fsdp=2", {{"training.compile", "true"}}, "use dp in place of fsdp, or remove --compile"},
           {"pp=2", {{"parallel.pipeline_stages", "3"}}, "not divisible by pp=2; use 2 or 4"},
           {"pp=2", {{"parallel.pipeline_schedule", "DualPipeV"}, {"parallel.microbatches", "2"}}, "at least as many"},
           {"pp=8", {}, "has 4 layers (2 blocks, embedding and head): use fewer stages, or --layers 6"},
           {"pp=2,fsdp=2", {{"parallel.pipeline_schedule", "ZBVZeroBubble"}}, "Interleaved1F1B"},
           {"dp=2", {{"parallel.microbatches", "4"}}, "has no axis pp; add pp, as in pp=2, or use --accumulate 4"},
           {"cp=3", {}, "8 tokens, which are not divisible by 6"},
           {"cp=4", {{"parallel.context_method", "ulysses"}}, "use cp of 1, 2, or --context-method ring"},
           {"cp=2", {{"model.dropout", "0.1"}}, "use --model.dropout 0"},
           {"dp=2,ep=2", {}, "gpt-tiny has no experts; use --model mixtral-tiny"},
           {"ep=2", {{"model.name", "mixtral-tiny"}, {"model.heads", "4"}}, "does not divide their product 1"},
           {"dp=2,xp=2", {}, "unknown axis 'xp'; allowed: pp (pipeline stages)"},
           {"dp=1", {{"model.top_k", "2"}}, "has no experts; set model.experts of a Llama"},
       }) {
    SCOPED_TRACE(each.mesh);
    auto config = tiny();
    for (const auto& [key, value] : each.options) set_option(config, key, value);
    config.parallel.mesh = each.mesh;
    EXPECT_ERROR(UsageError, check(config, ranks_of(config.parallel)), each.message);
    EXPECT_FALSE(config_errors(config, ranks_of(config.parallel)).empty());
  }
}

TEST(FiveAxes, PlansSayWhatHappens) {
  const auto expect_as_planned = [](TrainConfig config, const std::string& mesh) {
    SCOPED_TRACE(mesh);
    config.training.steps = 2;
    config.parallel.mesh = mesh;
    const auto plan = plan_training(config, ranks_of(config.parallel));
    const auto result = run(config, mesh);
    EXPECT_EQ(plan.parameter_bytes, result.parameter_bytes);
    auto planned = plan.traffic_by_axis();
    for (const auto& [axis, traffic] : result.traffic) {
      EXPECT_EQ(planned[axis].collectives, traffic.collectives) << axis;
      if (axis != "ep") {  // depends on the routing
        EXPECT_EQ(planned[axis].bytes, traffic.bytes) << axis;
      }
    }
    EXPECT_EQ(planned.size(), result.traffic.size());
  };
  expect_as_planned(gpt(), "pp=2,dp=2");
  expect_as_planned(gpt(), "cp=2,tp=2");
  expect_as_planned(llama(), "pp=2,dp=2,cp=2,tp=2");
  expect_as_planned(mixtral(), "pp=2,dp=4,ep=2");
}

TEST(FiveAxes, PlanShowsBubbleAndMemoryPerRank) {
  TrainConfig config;
  config.model.name = "llama-8b";
  config.data.path = "tokens.bin";  // is not opened
  config.parallel.mesh = "pp=4,fsdp=8,cp=2,tp=4";
  config.parallel.microbatches = 16;
  config.training.batch = 256;
  const auto plan = plan_training(config, 256);
  ASSERT_TRUE(plan.pipeline);
  EXPECT_EQ(plan.pipeline->stages, 4);
  EXPECT_GT(plan.pipeline->bubble, 0.1);
  EXPECT_LT(plan.pipeline->bubble, 0.35);
  ASSERT_EQ(plan.pipeline->ranks.size(), 4u);
  EXPECT_GT(plan.pipeline->ranks[0].memory_bytes, plan.pipeline->ranks[2].memory_bytes);  // more microbatches in flight
  config.parallel.pipeline_schedule = "ZBVZeroBubble";
  EXPECT_LT(plan_training(config, 256).pipeline->bubble, plan.pipeline->bubble);
  std::ostringstream text;
  text << plan;
  EXPECT_CONTAINS(text.str(), "Pipeline 1F1B: 4 stages, 16 microbatches, bubble");
  EXPECT_CONTAINS(text.str(), "send of activations");
}

}  // namespace
}  // namespace tessera::train
