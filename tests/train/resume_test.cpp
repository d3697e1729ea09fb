// A resumed run continues as if it had not been interrupted.
#include "tessera/base/error.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/folders.h"
#include "tessera/checkpoint/load.h"
#include "tessera/checkpoint/save.h"
#include "tessera/dtensor/random.h"
#include "tessera/testing/expect_error.h"
#include "tests/checkpoint/new_folder.h"
#include "tests/train/tiny_run.h"

#include <filesystem>

namespace tessera::train {
namespace {

using dcp::NewFolder;

struct Losses {
  std::vector<double> losses;
  int64_t samples_read = 0;
  uint64_t first_offset = 0, last_offset = 0;  // of tessera::random
};

// Makes `steps` steps, from the checkpoint `from` if not empty, and saves to `to` if not empty.
Losses train(TrainConfig config, const std::string& mesh, int64_t steps, const std::string& from,
             const std::string& to) {
  config.parallel.mesh = mesh;
  config.checkpoint.resume = from;
  Losses result;
  run_ranks(std::max<int64_t>(1, ranks_of(config.parallel)), [&](Rank& me) {
    const CompileScope no_codegen({.codegen = false});
    Trainer trainer(config, me.world);
    EXPECT_EQ(trainer.resumed_from(), from);
    Losses mine;
    mine.first_offset = random::state().offset;
    for (int64_t i = 0; i < steps; i++) {
      const auto metrics = trainer.step().metrics;
      mine.losses.push_back(metrics.loss);
      mine.samples_read = metrics.samples_read;
    }
    if (!to.empty()) random::rand({1});  // advances the offset, as random ops on DTensors do
    mine.last_offset = random::state().offset;
    if (!to.empty()) trainer.save(to);
    if (me.rank == 0) result = mine;
  });
  return result;
}

TrainConfig short_run() {
  auto config = tiny();
  config.training.steps = 20;  // length of the learning rate schedule
  return config;
}

Losses tail(const Losses& run, size_t from) {
  return {{run.losses.begin() + static_cast<std::ptrdiff_t>(from), run.losses.end()}, run.samples_read, 0, 0};
}

TEST(Resume, OnTheSameMeshItIsBitIdentical) {
  for (const std::string mesh : {"", "dp=2", "fsdp=4", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2"}) {
    SCOPED_TRACE(mesh);
    const NewFolder folder;
    const auto uninterrupted = train(short_run(), mesh, 20, "", "");
    const auto first = train(short_run(), mesh, 10, "", folder / "half");
    const auto second = train(short_run(), mesh, 10, folder / "half", "");
    EXPECT_EQ(second.first_offset, first.last_offset);
    EXPECT_EQ(second.losses, tail(uninterrupted, 10).losses);
    EXPECT_EQ(second.samples_read, uninterrupted.samples_read);
  }
}

TEST(Resume, OnAnotherMeshTheLossesAreEqual) {
  const NewFolder folder;
  const auto uninterrupted = tail(train(short_run(), "dp=2,tp=2", 20, "", ""), 10);
  train(short_run(), "dp=2,tp=2", 10, "", folder / "half");
  for (const std::string mesh : {"", "dp=4", "fsdp=2,tp=2", "tp=2"}) {
    SCOPED_TRACE(mesh);
    const auto second = train(short_run(), mesh, 10, folder / "half", "");
    for (size_t i = 0; i < 10; i++)
      EXPECT_NEAR(second.losses[i], uninterrupted.losses[i], 1e-5 * uninterrupted.losses[i]) << i;
    EXPECT_EQ(second.samples_read, uninterrupted.samples_read);
  }
}

// State that is easily forgotten: the fp16 scale, dropout masks, a compiled step, accumulation, the loss window.
TEST(Resume, RestoresAllState) {
  struct Case {
    const char *key, *value, *mesh;
  };
  for (const auto& c : {Case{"training.precision", "fp16", "fsdp=2"}, Case{"model.dropout", "0.2", ""},
                        Case{"model.dropout", "0.2", "tp=1"}, Case{"training.compile", "true", "dp=2"},
                        Case{"training.accumulate", "2", "fsdp=2"}, Case{"guard.spike", "50", ""}}) {
    SCOPED_TRACE(c10::str(c.key, " on ", c.mesh));
    const NewFolder folder;
    auto config = short_run();
    set_option(config, c.key, c.value);
    const auto run = [&](int64_t steps, const std::string& from, const std::string& to) {
      at::manual_seed(5);  // as in a new process
      return train(config, c.mesh, steps, from, to);
    };
    const auto uninterrupted = run(8, "", "");
    run(4, "", folder / "half");
    EXPECT_EQ(run(4, folder / "half", "").losses, tail(uninterrupted, 4).losses);
    const bool scales = dcp::open_source(folder / "half").manifest.find("scaler.scale") != nullptr;
    EXPECT_EQ(scales, config.training.precision == "fp16");
  }
}

at::Tensor saved_scale(const std::string& path) {
  auto scale = at::zeros({1});
  run_ranks(1, [&](Rank&) { dcp::load({{"scaler.scale", scale}}, path, {.strict = false}); });
  return scale;
}

// Replaces the saved scale, because few steps do not change it.
TEST(Resume, RestoresTheFp16Scale) {
  const NewFolder folder;
  auto config = short_run();
  config.training.precision = "fp16";
  train(config, "fsdp=2", 1, "", folder / "x");
  run_ranks(1, [&](Rank&) {
    const auto source = dcp::open_source(folder / "x");
    StateDict all;
    for (const auto& saved : source.manifest.tensors) all.insert(saved.name, at::zeros(saved.sizes, saved.dtype));
    dcp::load(all, folder / "x");
    all.at("scaler.scale").fill_(1024);
    dcp::save(all, folder / "x", source.manifest.values, {.overwrite = true});
  });
  EXPECT_TRUE(saved_scale(folder / "x").equal(at::full({1}, 1024.0)));
  train(config, "fsdp=2", 0, folder / "x", folder / "y");
  EXPECT_TRUE(saved_scale(folder / "y").equal(at::full({1}, 1024.0)));
}

TEST(Resume, AutoResumesTheLatestAndOldOnesAreDeleted) {
  const NewFolder folder;
  auto config = tiny();
  config.metrics.output = folder.path();
  config.checkpoint = {.every = 2, .keep = 2, .resume = "auto"};
  config.eval.sample_tokens = 0;
  config.eval.samples = 8;
  struct Watch final : MetricsSink {
    std::vector<std::string> saved;
    int64_t evals = 0;
    void on_checkpoint(const std::string& path) override { saved.push_back(path); }
    void on_eval(const EvalMetrics&) override { evals++; }
  };
  const auto run = [&](int64_t steps, int64_t expected_start) {
    const auto watch = std::make_shared<Watch>();
    config.training.steps = steps;
    run_ranks(2, [&](Rank& me) {
      Trainer trainer(config, me.world);
      EXPECT_EQ(trainer.steps_made(), expected_start);
      if (me.rank == 0) trainer.add(watch);
      EXPECT_EQ(trainer.run().steps, steps);
    });
    EXPECT_EQ(watch->evals, 1);
    return watch->saved;
  };
  const auto at = [&](int64_t step) { return dcp::step_folder(folder / "checkpoints", step); };
  EXPECT_EQ(run(5, 0), (std::vector{at(2), at(4), at(5)}));
  EXPECT_FALSE(std::filesystem::exists(at(2)));
  EXPECT_TRUE(std::filesystem::exists(at(4)));
  EXPECT_EQ(run(7, 5), (std::vector{at(6), at(7)}));
  EXPECT_EQ(run(7, 7), (std::vector<std::string>{}));
  // After resuming an earlier checkpoint, later ones of the other run are kept.
  config.checkpoint.resume = at(6);
  config.checkpoint.every = 1;
  config.checkpoint.keep = 1;
  EXPECT_EQ(run(7, 6), (std::vector{at(7)}));
  EXPECT_EQ(dcp::latest(folder / "checkpoints"), at(7));
}

TEST(Resume, ErrorsAreOneLine) {
  const NewFolder folder;
  train(short_run(), "", 1, "", folder / "x");
  const auto says = [&](TrainConfig config, const std::string& path, const std::string& text) {
    config.checkpoint.resume = path;
    run_ranks(1, [&](Rank& me) {
      const auto said = testing::error_message<UsageError>([&] { Trainer(config, me.world); });
      EXPECT_CONTAINS(said, text);
      EXPECT_EQ(said.find('\n'), std::string::npos) << said;
    });
  };
  auto larger = short_run();
  larger.model.layers = 3;
  says(larger, folder / "x", ": its model is GPT2(vocab_size=");
  says(larger, folder / "x", ", but the config has GPT2(vocab_size=");
  says(short_run(), folder / "nowhere", "nowhere");
  says(short_run(), "auto", "--resume auto needs --output or --checkpoint-folder");
  auto nowhere = short_run();
  nowhere.checkpoint.every = 1;
  says(nowhere, "", "checkpoint.every is 1, but the checkpoint folder is not set; set checkpoint.folder or");
  dcp::write(folder / "y.safetensors", std::string("\x08\0\0\0\0\0\0\0{}      ", 16));
  says(short_run(), folder / "y.safetensors", "it has no 'model', so it is not a checkpoint of a trainer");
  auto with_dropout = short_run();
  with_dropout.model.dropout = 0.1;  // dropout may change
  EXPECT_EQ(train(with_dropout, "", 1, folder / "x", "").losses.size(), 1u);
}

// Counts calls of on_checkpoint.
struct CheckpointCount final : MetricsSink {
  std::vector<std::string> paths;
  void on_checkpoint(const std::string& path) override { paths.push_back(path); }
};

TEST(Resume, FromAnAsynchronousCheckpointItIsBitIdentical) {
  const NewFolder folder;
  auto config = short_run();
  config.parallel.mesh = "fsdp=2";
  config.eval.sample_tokens = 0;
  config.checkpoint = {.every = 5, .folder = folder.path(), .keep = 2, .async = true};
  run_ranks(2, [&](Rank& me) {
    Trainer trainer(config, me.world);
    const auto count = std::make_shared<CheckpointCount>();
    trainer.add(count);
    trainer.run();
    ASSERT_EQ(count->paths.size(), 4u);
    EXPECT_EQ(count->paths.back(), dcp::step_folder(folder.path(), 20));
  });
  EXPECT_EQ(dcp::steps_in(folder.path()).size(), 2u);
  const auto uninterrupted = train(short_run(), "fsdp=2", 20, "", "");
  const auto second = train(short_run(), "fsdp=2", 5, dcp::step_folder(folder.path(), 15), "");
  EXPECT_EQ(second.losses, tail(uninterrupted, 15).losses);
}

TEST(Resume, SaysWhichOptionsDifferAndWhatThatChanges) {
  const NewFolder folder;
  train(short_run(), "dp=2", 10, "", folder / "half");
  const auto changes_with = [&](const std::function<void(TrainConfig&)>& change) {
    auto config = short_run();
    config.parallel.mesh = "dp=2";
    config.checkpoint.resume = folder / "half";
    change(config);
    std::vector<std::string> changes;
    run_ranks(ranks_of(config.parallel), [&](Rank& me) {
      const auto found = Trainer(config, me.world).resume_changes();
      if (me.rank == 0) changes = found;
    });
    return changes;
  };
  using Lines = std::vector<std::string>;
  EXPECT_EQ(changes_with([](TrainConfig&) {}), Lines());
  EXPECT_EQ(changes_with([](TrainConfig& c) { c.data.prefetch = 7, c.eval.every = 3, c.training.compile = true; }),
            Lines());
  EXPECT_EQ(changes_with([](TrainConfig& c) { c.training.batch = 4; }),
            Lines{"training.batch is 4, and was 8; the data continue after sample 80, and later batches have other "
                  "samples"});
  EXPECT_EQ(changes_with([](TrainConfig& c) { c.training.seed = 4; }),
            Lines{"training.seed is 4, and was 3; the order of the data after sample 80 is that of the new seed"});
  EXPECT_EQ(changes_with([](TrainConfig& c) { c.optimizer.schedule = "constant"; }),
            Lines{"optimizer.schedule is constant, and was cosine; the learning rate of step 11 is 0.005, and would "
                  "have been " +
                  option_text(5e-3 * learning_rate_factor(short_run().optimizer, 20)(10))});
  EXPECT_EQ(changes_with([](TrainConfig& c) { c.parallel.mesh = "tp=2"; }),
            Lines{"parallel.mesh is tp=2, and was dp=2; the same samples; sums are rounded differently"});
  const auto several = changes_with([](TrainConfig& c) { c.data.digits = 1, c.optimizer.clip = 2; });
  ASSERT_EQ(several.size(), 2u);
  EXPECT_EQ(several[0],
            "data.digits is 1, and was 2; sample 80 of the new data is next, which is not what follows in "
            "the old data");
  EXPECT_EQ(several[1], c10::str("optimizer.clip is ", option_text(2.0), ", and was ", option_text(1.0),
                                 "; later steps update differently"));
}

}  // namespace
}  // namespace tessera::train
