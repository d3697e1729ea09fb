// Compiled steps, precision, padding, validation, sampling, and steps that go wrong.
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tests/train/tiny_run.h"

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

namespace tessera::train {
namespace {

TEST(Trainer, ACompiledStepGivesEqualLosses) {
  auto config = tiny();
  config.training.steps = 6;
  const auto one_rank = run(config, "");
  config.training.compile = true;
  expect_same_on({"", "dp=2", "tp=2", "dp=2,tp=2", "fsdp=4", "fsdp=2,tp=2", "dp=2,fsdp=2"}, config, one_rank);
}

TEST(Trainer, ReducedPrecisionStaysClose) {
  auto config = tiny();
  config.training.steps = 20;
  const auto fp32 = run(config, "");
  for (const std::string precision : {"bf16", "fp16"})
    for (const std::string mesh : {"", "dp=2", "fsdp=2,tp=2"}) {
      SCOPED_TRACE(precision + " on " + mesh);
      config.training.precision = precision;
      config.training.compile = false;
      const auto got = run(config, mesh);
      expect_same(got, fp32, 0.02);
      EXPECT_NE(got.losses.back(), fp32.losses.back());  // it did not compute in fp32
      config.training.compile = true;
      expect_same(run(config, mesh), got);
    }
}

struct TextFile {
  explicit TextFile(int64_t bytes)
      : path((std::filesystem::temp_directory_path() / c10::str("tessera_trainer_test_", getpid())).string()) {
    std::ofstream file(path);
    for (int64_t i = 0; i < bytes; i++) file << static_cast<char>('a' + i * i % 23);
  }
  ~TextFile() { std::filesystem::remove(path); }
  const std::string path;
};

// Ten training samples in batches of eight: the second batch has two, both on rank 0.
TEST(Trainer, APaddedBatchIsAveragedOverItsSamples) {
  const TextFile file(11 * 8 + 1);
  auto config = tiny();
  config.data = {.path = file.path, .seq_len = 8, .last_batch = "pad"};
  config.training.steps = 6;
  const auto one_rank = run(config, "");
  EXPECT_EQ(one_rank.samples_read, 30);
  expect_same_on({"dp=4", "fsdp=2,tp=2"}, config, one_rank);
}

TEST(Trainer, ValidationIsEqualOnEveryMesh) {
  auto config = tiny();
  config.training.steps = 3;
  config.eval = {.every = 2, .samples = 20, .sample_tokens = 3};
  struct Watch final : MetricsSink {
    std::vector<EvalMetrics> evals;
    int64_t steps = 0;
    void on_step(const StepMetrics&) override { steps++; }
    void on_eval(const EvalMetrics& metrics) override { evals.push_back(metrics); }
  };
  std::vector<EvalMetrics> first;
  std::string text;
  for (const std::string mesh : {"dp=1", "dp=2,tp=2"}) {
    config.parallel.mesh = mesh;
    run_ranks(ranks_of(config.parallel), [&](Rank& me) {
      Trainer trainer(config, me.world);
      const auto watch = std::make_shared<Watch>();
      trainer.add(watch);
      const auto result = trainer.run();
      EXPECT_EQ(result.steps, 3);
      EXPECT_EQ(result.stopped, "");
      EXPECT_EQ(watch->steps, 3);
      ASSERT_EQ(watch->evals.size(), 2u);
      EXPECT_EQ(watch->evals[1].step, 3);
      EXPECT_EQ(watch->evals[1].samples, 20);
      if (first.empty()) first = watch->evals, text = result.sample;
      for (size_t i = 0; i < 2; i++) EXPECT_NEAR(watch->evals[i].loss, first[i].loss, 1e-5 * first[i].loss);
      EXPECT_EQ(result.sample, text);
      EXPECT_EQ(result.sample.size(), 9u);  // a problem and its answer
    });
  }
}

TEST(Trainer, GeneratesTheSameTextOnEveryMesh) {
  const TextFile file(500);
  auto config = tiny();
  config.data = {.path = file.path, .seq_len = 8};
  config.training.steps = 2;
  config.eval = {.samples = 8, .sample_tokens = 24};
  const auto text = [&](const std::string& mesh, double temperature, uint64_t seed) {
    config.parallel.mesh = mesh;
    config.eval.temperature = temperature;
    config.training.seed = seed;
    std::string generated;
    run_ranks(ranks_of(config.parallel), [&](Rank& me) {
      const auto mine = Trainer(config, me.world).run().sample;
      if (me.rank == 1) generated = mine;
    });
    return generated;
  };
  EXPECT_EQ(text("dp=2", 1, 3), text("tp=2", 1, 3));
  EXPECT_NE(text("dp=2", 1, 3), text("dp=2", 1, 4));
  EXPECT_NE(text("dp=2", 1, 3), text("dp=2", 0, 3));
}

// The first gradient of rank 0 is multiplied by the returned tensor.
at::Tensor gradient_factor(Trainer& trainer, const Rank& me) {
  auto factor = at::ones({});
  if (me.rank == 0)
    trainer.model().module().parameters()[0].register_hook(
        [factor](const at::Tensor& gradient) { return gradient * factor; });
  return factor;
}

TEST(Trainer, ANonFiniteStepIsSkippedOrStopsTraining) {
  auto config = tiny();
  config.parallel.mesh = "dp=2";
  config.training.steps = 4;
  for (const bool compiled : {false, true})
    for (const std::string action : {"skip", "stop"}) {
      SCOPED_TRACE(c10::str(action, compiled ? ", compiled" : ""));
      config.guard.on_nan = action;
      config.training.compile = compiled;
      run_ranks(2, [&](Rank& me) {
        const CompileScope no_codegen({.codegen = false});
        Trainer trainer(config, me.world);
        auto factor = gradient_factor(trainer, me);
        trainer.step();
        const auto weight = trainer.model().module().parameters()[0].detach().clone();
        factor.fill_(std::nan(""));
        const auto second = trainer.step();
        EXPECT_EQ(second.verdict.reason, "the gradient norm is nan");
        EXPECT_EQ(second.metrics.skipped, "the gradient norm is nan");
        EXPECT_EQ(second.verdict.action, action == "skip" ? LossMonitor::Action::Skip : LossMonitor::Action::Stop);
        EXPECT_TRUE(at::equal(trainer.model().module().parameters()[0].detach(), weight));
        if (action == "stop") return;
        factor.fill_(1);
        EXPECT_EQ(trainer.step().verdict, LossMonitor::Verdict());
        EXPECT_FALSE(at::equal(trainer.model().module().parameters()[0].detach(), weight));
      });
    }
  struct BreakSecondStep final : MetricsSink {
    at::Tensor factor;
    void on_step(const StepMetrics&) override { factor.fill_(std::nan("")); }
  };
  run_ranks(2, [&](Rank& me) {
    Trainer trainer(config, me.world);
    const auto breaks = std::make_shared<BreakSecondStep>();
    breaks->factor = gradient_factor(trainer, me);
    trainer.add(breaks);
    const auto result = trainer.run();
    EXPECT_EQ(result.steps, 2);
    EXPECT_EQ(result.stopped, "step 2: the gradient norm is nan");
  });
}

TEST(Trainer, ContinuesAfterASkippedStepInFp16) {
  auto config = tiny();
  config.training.precision = "fp16";
  config.training.steps = 60;
  config.optimizer.lr = 1;  // causes loss spikes
  config.guard = {.on_spike = "skip", .spike = 0.01};
  run_ranks(1, [&](Rank& me) {
    Trainer trainer(config, me.world);
    int skipped = 0;
    for (int i = 0; i < 60; i++) skipped += trainer.step().metrics.skipped.empty() ? 0 : 1;
    EXPECT_GT(skipped, 1);
  });
}

TEST(Trainer, RejectsAWrongMeshBeforeAnyCollective) {
  auto config = tiny();
  config.parallel.mesh = "dp=3";
  run_ranks(2, [&](Rank& me) {
    EXPECT_ERROR(UsageError, Trainer(config, me.world), "mesh 'dp=3' needs 3 ranks, but there are 2");
  });
}

}  // namespace
}  // namespace tessera::train
