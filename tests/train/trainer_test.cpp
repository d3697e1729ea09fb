// Ways to compute a step, and what happens when one goes wrong.
#include "tessera/base/error.h"
#include "tessera/testing/message_of.h"
#include "tests/train/tiny_run.h"

#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>

namespace tessera::train {
namespace {

TEST(Trainer, ACompiledStepIsTheStep) {
  auto config = tiny();
  config.training.steps = 6;
  const auto alone = run(config, "");
  config.training.compile = true;
  for (const std::string mesh : {"", "dp=2", "tp=2", "dp=2,tp=2"}) {
    SCOPED_TRACE(mesh);
    expect_same(run(config, mesh), alone);
  }
}

TEST(Trainer, ReducedPrecisionStaysClose) {
  auto config = tiny();
  config.training.steps = 20;
  const auto precise = run(config, "");
  for (const std::string precision : {"bf16", "fp16"})
    for (const std::string mesh : {"", "dp=2", "fsdp=2,tp=2"}) {
      SCOPED_TRACE(precision + " on " + mesh);
      config.training.precision = precision;
      const auto got = run(config, mesh);
      expect_same(got, precise, 0.02);
      EXPECT_NE(got.losses.back(), precise.losses.back());  // it is not computed in fp32 after all
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

// Ten samples of training in batches of eight: the second has two, all of them on the first rank.
TEST(Trainer, APaddedBatchIsTheMeanOfWhatItHas) {
  const TextFile file(11 * 8 + 1);
  auto config = tiny();
  config.data = {.path = file.path, .seq_len = 8, .last_batch = "pad"};
  config.training.steps = 6;
  const auto alone = run(config, "");
  EXPECT_EQ(alone.samples_read, 30);
  for (const std::string mesh : {"dp=4", "fsdp=2,tp=2"}) {
    SCOPED_TRACE(mesh);
    expect_same(run(config, mesh), alone);
  }
}

TEST(Trainer, EvaluatesTheSameOnEveryMesh) {
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
      EXPECT_EQ(result.sample.size(), 9u);  // a sum and its answer
    });
  }
}

// The gradient of the second step is not a number on one rank, which is not on all.
void break_second_step(Trainer& trainer, const Rank& me) {
  if (me.rank != 0) return;
  auto calls = std::make_shared<int>(0);
  trainer.layout().module().parameters()[0].register_hook(
      [calls](const at::Tensor& gradient) { return ++*calls == 2 ? gradient * std::nan("") : gradient; });
}

TEST(Trainer, AStepThatIsNoNumberIsSkippedOrTheLast) {
  auto config = tiny();
  config.parallel.mesh = "dp=2";
  config.training.steps = 4;
  for (const std::string action : {"skip", "stop"}) {
    SCOPED_TRACE(action);
    config.guard.on_nan = action;
    run_ranks(2, [&](Rank& me) {
      Trainer trainer(config, me.world);
      break_second_step(trainer, me);
      trainer.step();
      const auto weight = trainer.layout().module().parameters()[0].detach().clone();
      const auto second = trainer.step();
      EXPECT_EQ(second.verdict.reason, "the gradient's norm is nan");
      EXPECT_EQ(second.metrics.skipped, "the gradient's norm is nan");
      EXPECT_EQ(second.verdict.action, action == "skip" ? Sentinel::Action::Skip : Sentinel::Action::Stop);
      EXPECT_TRUE(at::equal(trainer.layout().module().parameters()[0].detach(), weight));
      if (action == "stop") return;
      EXPECT_EQ(trainer.step().verdict, Sentinel::Verdict());
    });
  }
  run_ranks(2, [&](Rank& me) {
    Trainer trainer(config, me.world);
    break_second_step(trainer, me);
    const auto result = trainer.run();
    EXPECT_EQ(result.steps, 2);
    EXPECT_EQ(result.stopped, "step 2: the gradient's norm is nan");
  });
}

TEST(Trainer, RefusesBeforeItTalksToAnybody) {
  auto config = tiny();
  config.parallel.mesh = "dp=3";
  run_ranks(2, [&](Rank& me) {
    EXPECT_ERROR(UsageError, Trainer(config, me.world), "mesh 'dp=3' has 3 ranks, and 2 are there");
  });
}

}  // namespace
}  // namespace tessera::train
