// Properties of a run: rows of metrics, the output folder, resumed files, the terminal, memory, and exit codes of
// errors.
#include "tessera/base/detail/json.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/testing/expect_error.h"
#include "tessera/train/detail/console.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/event_file.h"
#include "tessera/train/detail/memory_check.h"
#include "tessera/train/detail/output_folder.h"
#include "tessera/train/plan.h"
#include "tests/checkpoint/new_folder.h"
#include "tests/train/tiny_run.h"

#include <pty.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <sstream>
#include <thread>

namespace tessera::train {
namespace {

namespace fs = std::filesystem;
using dcp::NewFolder;

TrainConfig text_run(const std::string& file) {
  auto config = tiny();
  config.data = {.path = file, .seq_len = 8, .last_batch = "pad"};
  return config;
}

// In every row, max_loss is the largest loss of a data-parallel rank, and `loss` is their mean.
TEST(MetricsRows, MaxLossIsAtLeastTheMean) {
  const NewFolder folder;
  std::ofstream(folder / "text") << std::string(11 * 8 + 1, 'a') + std::string(40, 'b');
  for (const bool padded : {false, true})
    for (const std::string mesh : {"dp=1", "dp=3", "fsdp=2", "dp=2,fsdp=2", "dp=2,tp=2"}) {
      SCOPED_TRACE(mesh);
      auto config = padded ? text_run(folder / "text") : tiny();
      config.training.batch = 12;
      config.parallel.mesh = mesh;
      run_ranks(ranks_of(config.parallel), [&](Rank& me) {
        Trainer trainer(config, me.world);
        bool above = false;
        for (int step = 0; step < 4; step++) {
          const auto row = trainer.step().metrics;
          EXPECT_GE(row.max_loss, row.loss) << "step " << row.step;
          EXPECT_LE(row.max_loss, row.loss * static_cast<double>(me.size()) + 1e-9) << "step " << row.step;
          above = above || row.max_loss > row.loss;
        }
        EXPECT_EQ(above, trainer.model().data_ranks() > 1);
      });
    }
}

// A run that is killed at any byte of its metrics and resumed at an earlier step has each step once.
TEST(MetricsFile, AResumedRunHasEachStepOnce) {
  const NewFolder folder;
  const auto path = folder / "metrics.jsonl";
  std::mt19937_64 random(11);
  for (int round = 0; round < 50; round++) {
    const auto write = [&](int64_t from, int64_t to, int64_t eval_every) {
      MetricsFile file(path, from);
      for (int64_t step = from + 1; step <= to; step++) {
        file.on_step({.step = step, .loss = 1, .max_loss = 1});
        if (step % eval_every == 0) file.on_eval({.step = step});
      }
      file.on_eval({.step = to});  // at the end of a run, also if the checkpoint already had all steps
    };
    fs::remove(path);
    int64_t done = 0;
    for (int run = 0; run < 4; run++) {
      const int64_t to = done + static_cast<int64_t>(random() % 20);
      write(done, to, 1 + static_cast<int64_t>(random() % 5));
      const int64_t checkpoint = static_cast<int64_t>(random() % static_cast<uint64_t>(to + 1));
      // The run wrote at least the steps of its last checkpoint.
      const auto text = dcp::read(path);
      const auto safe = text.find(c10::str("{\"step\":", checkpoint + 1, ",\"loss\""));
      if (safe != text.npos) fs::resize_file(path, safe + random() % (text.size() - safe + 1));
      done = checkpoint;
    }
    write(done, 60, 4);
    std::multiset<int64_t> steps, evals;
    std::istringstream lines(dcp::read(path));
    for (std::string line; std::getline(lines, line);) {
      const auto json = Json::parse(line, "a line");
      (json.find("eval_loss") ? evals : steps).insert(json.at("step").number());
    }
    ASSERT_EQ(steps.size(), 60u);
    for (int64_t step = 1; step <= 60; step++) ASSERT_EQ(steps.count(step), 1u) << "step " << step;
    for (const int64_t step : evals) ASSERT_EQ(evals.count(step), 1u) << "validation at step " << step;
  }
}

TEST(EventFile, AResumedRunReplacesLaterSteps) {
  EXPECT_EQ(detail::restart_event(0, 5), std::string("\x09\0\0\0\0\0\0\0\0\x10\x05\x3a\x02\x08\x01", 15));
}

// The working directory of a test, because new folders are below outputs/.
struct InFolder {
  explicit InFolder(const std::string& path) : before(fs::current_path()) { fs::current_path(path); }
  ~InFolder() { fs::current_path(before); }
  const fs::path before;
};

TEST(OutputFolder, RunsThatStartTogetherHaveDifferentFolders) {
  const NewFolder folder;
  const InFolder here(folder.path());
  std::vector<std::string> paths(16);
  std::vector<std::thread> runs;
  for (auto& path : paths) runs.emplace_back([&path] { path = OutputFolder(tiny(), false).path(); });
  for (auto& run : runs) run.join();
  EXPECT_EQ(std::set<std::string>(paths.begin(), paths.end()).size(), paths.size());
  for (const auto& path : paths) EXPECT_TRUE(fs::exists(path + "/config.toml")) << path;
}

TEST(OutputFolder, BelongsToOneRun) {
  const NewFolder folder;
  auto config = tiny();
  config.metrics.output = folder / "out";
  {
    const OutputFolder first(config, false);
    for (const bool overwrite : {false, true})
      EXPECT_ERROR(UsageError, OutputFolder(config, overwrite), "another run is writing to '", "choose another folder");
    auto resumed = config;
    resumed.checkpoint.resume = "auto";
    EXPECT_ERROR(UsageError, OutputFolder(resumed, false), "another run is writing to '");
  }
  const char* words = "of an earlier run; choose another --output, continue that run with --resume auto, or delete";
  EXPECT_ERROR(UsageError, OutputFolder(config, false), "config.toml", words);
  EXPECT_ERROR(UsageError, check_output(config, false), "config.toml", words);
  auto resumed = config;
  resumed.checkpoint.resume = "auto";
  EXPECT_NO_THROW(OutputFolder(resumed, false));
  EXPECT_ERROR(UsageError, check_output(resumed, true), "--overwrite", "give one of them");

  // The checkpoints of an earlier run would be resumed instead of those of this run.
  run_ranks(1, [&](Rank&) { dcp::save({}, dcp::step_folder(folder / "out/checkpoints", 500)); });
  dcp::write(folder / "out/metrics.jsonl", "old");
  auto saving = config;
  saving.checkpoint.every = 2;
  for (const char* name : {"config.toml", "metrics.jsonl"}) {
    EXPECT_ERROR(UsageError, check_output(saving, false), name);
    fs::remove(folder / (std::string("out/") + name));
  }
  EXPECT_ERROR(UsageError, check_output(saving, false), "step-500", words);
  { const OutputFolder replaced(saving, true); }
  EXPECT_EQ(dcp::latest(folder / "out/checkpoints"), std::nullopt);
  EXPECT_FALSE(fs::exists(folder / "out/metrics.jsonl"));

  // Two runs with one checkpoint folder would delete each other's partial checkpoints.
  auto other = saving;
  other.metrics.output = folder / "other";
  saving.checkpoint.folder = other.checkpoint.folder = folder / "shared";
  const OutputFolder first(saving, true);
  EXPECT_ERROR(UsageError, OutputFolder(other, false), "another run is writing to '", "shared");
}

// A bar that wraps leaves a line behind at every step.
TEST(Console, ANarrowTerminalKeepsOneProgressLine) {
  for (const unsigned short columns : {2, 8, 20, 37, 80}) {
    SCOPED_TRACE(columns);
    int screen = -1, terminal = -1;
    winsize size{24, columns, 0, 0};
    if (openpty(&screen, &terminal, nullptr, nullptr, &size) != 0) GTEST_SKIP() << "no pseudo terminal";
    std::ostringstream out;
    {
      Console console(out, {.steps = 1000000, .log_every = 1000000, .terminal = terminal});
      for (int64_t step = 2; step <= 4; step++)
        console.on_step({.step = step * 12345, .seconds = 0.5, .tokens_per_second = 1});
    }
    close(screen), close(terminal);
    const auto text = out.str();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 0);
    std::istringstream parts(text);
    int bars = 0;
    for (std::string part; std::getline(parts, part, '\r');) {
      if (part.starts_with("\x1b[K")) part.erase(0, 3);
      EXPECT_LT(part.size(), columns) << part;
      if (!part.empty()) bars++;
    }
    EXPECT_EQ(bars, 3);
    EXPECT_EQ(text.find('#') != text.npos || text.find('.') != text.npos, columns >= 37);
  }
}

TEST(Eval, TextHasPerplexityAndIsSampled) {
  const NewFolder folder;
  std::ofstream(folder / "text") << [] {
    std::string text;
    for (int i = 0; i < 400; i++) text += static_cast<char>('a' + i * i % 23);
    return text;
  }();
  auto config = text_run(folder / "text");
  config.training.steps = 2;
  config.eval = {.samples = 4, .sample_tokens = 16};
  std::string automatic, greedy;
  run_ranks(1, [&](Rank& me) {
    Trainer trainer(config, me.world);
    const auto metrics = trainer.evaluate();
    EXPECT_EQ(metrics.kind, EvalKind::Bytes);
    EXPECT_NEAR(metrics.perplexity(), std::exp(metrics.loss), 1e-9);
    EXPECT_NEAR(metrics.bits_per_byte(), metrics.loss / std::log(2), 1e-9);
    for (const auto& line : {eval_line(metrics), json_line(metrics)}) {
      EXPECT_CONTAINS(line, "perplexity");
      EXPECT_CONTAINS(line, "bits_per_byte");
      EXPECT_EQ(line.find("exact_match"), line.npos) << line;
    }
    automatic = trainer.sample();
  });
  config.eval.temperature = 0;
  run_ranks(1, [&](Rank& me) { greedy = Trainer(config, me.world).sample(); });
  EXPECT_NE(automatic, greedy);
  EXPECT_CONTAINS(eval_line({.step = 1, .loss = 1, .accuracy = 0.5, .samples = 4}), "exact_match: 50.00%");
}

TEST(Memory, ABatchThatCannotFitIsRefusedWithTheBound) {
  auto config = tiny();
  config.model.vocab_size = 1 << 20;  // 4 MB of logits per token
  config.training.batch = 1 << 24;
  const auto error = testing::error_message<UsageError>([&] { check_memory(config, 1, 1); });
  const std::string before = "training.batch is 16777216 and can be at most ";
  ASSERT_NE(error.find(before), error.npos) << error;
  const int64_t bound = std::stoll(error.substr(error.find(before) + before.size()));
  config.training.batch = bound;
  EXPECT_NO_THROW(check_memory(config, 1, 1));
  config.training.batch = bound + std::max<int64_t>(1, bound / 1000);
  EXPECT_ERROR(UsageError, check_memory(config, 1, 1), c10::str(" and can be at most ", bound));
  config = {};
  config.model = {.name = "llama-70b", .layers = 2000};
  config.data = {.path = "tokens.bin", .seq_len = 1};
  config.training.batch = 1;
  EXPECT_ERROR(UsageError, check_memory(config, 1, 1), "parameters, gradients and optimizer state alone take ");
  const auto plan = plan_training(tiny(), 1);
  EXPECT_GE(plan.memory_bytes(), min_memory_bytes(tiny(), 1) / 2);  // the same order of magnitude
}

TEST(Memory, PlanSaysThatItDoesNotFit) {
  auto plan = plan_training(tiny(), 1);
  EXPECT_GT(plan.device_memory, 1 << 28);
  EXPECT_CONTAINS(c10::str(plan), ". This config can run.\n");
  EXPECT_CONTAINS(c10::str(plan), "memory of the device");
  plan.device_memory = plan.memory_bytes() - 1;
  EXPECT_CONTAINS(c10::str(plan), ". This config does not fit.\n");
  EXPECT_CONTAINS(c10::str(plan), "It does not fit: a rank needs about ");
  plan.device_memory = 0;  // unknown
  EXPECT_CONTAINS(c10::str(plan), ". This config can run.\n");
}

TEST(Device, CudaWithoutAGpuIsOneLine) {
  const auto error = testing::error_message<UsageError>([] { check_device("cuda"); });
  if (error == "nothing was thrown") GTEST_SKIP() << "this host has a GPU";
  EXPECT_CONTAINS(error, "training.device is cuda, but LibTorch finds no CUDA device");
  EXPECT_EQ(error.find('\n'), error.npos);
  auto config = tiny();
  config.training.device = "cuda";
  run_ranks(1, [&](Rank& me) { EXPECT_ERROR(UsageError, Trainer(config, me.world), "finds no CUDA device"); });
}

// A step in a checkpoint is not a number of loops.
TEST(Resume, AHugeStepDoesNotHang) {
  const NewFolder folder;
  auto config = tiny();
  config.training.steps = 1000;
  double lr = 0;
  const auto save_with_step = [&](int64_t step) {
    run_ranks(1, [&](Rank& me) {
      Trainer(config, me.world).save(folder / "x");
      const auto source = dcp::open_source(folder / "x");
      StateDict all;
      for (const auto& saved : source.manifest.tensors) all.insert(saved.name, at::zeros(saved.sizes, saved.dtype));
      dcp::load(all, folder / "x");
      auto values = source.manifest.values;
      values["step"] = step;
      dcp::save(all, folder / "x", values, {.overwrite = true});
    });
  };
  const auto resume = [&] {
    auto resumed = config;
    resumed.checkpoint.resume = folder / "x";
    run_ranks(1, [&](Rank& me) { lr = Trainer(resumed, me.world).step().metrics.lr; });
  };
  save_with_step(int64_t{1} << 40);
  resume();
  EXPECT_NEAR(lr, config.optimizer.lr * config.optimizer.min_factor, 1e-12);
  save_with_step(600);
  resume();
  EXPECT_NEAR(lr, config.optimizer.lr * learning_rate_factor(config.optimizer, 1000)(600), 1e-12);
  for (const int64_t step : {(int64_t{1} << 40) + 1, int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    save_with_step(step);
    auto resumed = config;
    resumed.checkpoint.resume = folder / "x";
    EXPECT_ERROR(UsageError, find_checkpoint(resumed), c10::str("its step is ", step, "; it must be from 0 to "));
  }
}

}  // namespace
}  // namespace tessera::train
