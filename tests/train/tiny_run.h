#pragma once
// Short training runs of a tiny model, with threads as ranks.
#include "tessera/compile/api/compile.h"
#include "tessera/dtensor/detail/full_tensor_or_self.h"
#include "tessera/testing/ranks.h"
#include "tessera/train/detail/metrics_file.h"
#include "tessera/train/trainer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <mutex>

namespace tessera::train {

using testing::Rank;
using testing::run_ranks;

inline TrainConfig tiny() {
  TrainConfig config;
  config.model = {.name = "gpt-tiny", .max_seq_len = 16, .layers = 2, .heads = 2, .dim = 16};
  config.training.batch = 8;
  config.training.steps = 50;
  config.training.seed = 3;
  config.optimizer.lr = 5e-3;
  config.optimizer.warmup = 5;
  config.guard.checksum_every = 10;
  return config;
}

struct TrainRun {
  std::map<std::string, at::Tensor> weights;  // before the first step, of all pipeline stages
  std::vector<double> losses;
  int64_t samples_read = 0;
  std::map<std::string, Traffic> traffic;  // of the last step
  std::vector<int64_t> parameter_bytes;
  std::string line;  // of metrics.jsonl, for the last step
};

// Called on each rank before the first step.
using Setup = std::function<void(Trainer&, const Rank&)>;

inline TrainRun run(TrainConfig config, const std::string& mesh, const Setup& setup = {}) {
  config.parallel.mesh = mesh;
  TrainRun result;
  std::mutex mutex;
  std::map<std::string, at::Tensor> weights;
  run_ranks(std::max<int64_t>(1, ranks_of(config.parallel)), [&](Rank& me) {
    const CompileScope no_codegen({.codegen = false});
    Trainer trainer(config, me.world);
    TrainRun mine;
    for (const auto& [name, parameter] : trainer.model().parameters()) {
      const auto full = tessera::detail::full_tensor_or_self(parameter.detach()).clone();
      const std::lock_guard lock(mutex);
      weights[name] = full;
    }
    if (setup) setup(trainer, me);
    for (int64_t i = 0; i < config.training.steps; i++) {
      const auto metrics = trainer.step().metrics;
      mine.losses.push_back(metrics.loss);
      mine.samples_read = metrics.samples_read;
      mine.traffic = metrics.traffic;
      mine.parameter_bytes = metrics.parameter_bytes;
      mine.line = json_line(metrics);
    }
    if (me.rank == 0) result = mine;
  });
  result.weights = std::move(weights);
  return result;
}

inline void expect_same(const TrainRun& got, const TrainRun& want, double relative = 1e-5) {
  ASSERT_EQ(got.weights.size(), want.weights.size());
  for (const auto& [name, weight] : got.weights)
    EXPECT_TRUE(want.weights.contains(name) && at::equal(weight, want.weights.at(name))) << name;
  ASSERT_EQ(got.losses.size(), want.losses.size());
  for (size_t i = 0; i < got.losses.size(); i++)
    EXPECT_NEAR(got.losses[i], want.losses[i], relative * want.losses[i]) << "step " << i + 1;
  EXPECT_EQ(got.samples_read, want.samples_read);
}

// Training on each mesh gives what one rank gave.
inline void expect_same_on(const std::vector<std::string>& meshes, const TrainConfig& config,
                           const TrainRun& one_rank) {
  for (const auto& mesh : meshes) {
    SCOPED_TRACE(mesh);
    expect_same(run(config, mesh), one_rank);
  }
}

}  // namespace tessera::train
