#pragma once
#include "tessera/optim/schedulers.h"
#include "tessera/train/evaluate.h"
#include "tessera/train/layout.h"
#include "tessera/train/loader.h"
#include "tessera/train/metrics.h"
#include "tessera/train/sentinel.h"
#include "tessera/train/step.h"

#include <memory>
#include <string>
#include <vector>

namespace tessera::train {

struct TrainResult {
  int64_t steps = 0;  // that were made
  EvalMetrics eval = {};
  std::string sample = {};
  std::string stopped = {};  // why it ended early; empty: it did not
};

// A training from start to end, on the ranks of a world. Every rank makes one and makes the same calls.
// Example:  Trainer trainer(config, init());
//           if (world.rank() == 0) trainer.add(std::make_shared<MetricsFile>(path));
//           auto result = trainer.run();
class Trainer {
 public:
  // Throws UsageError for a config that check() refuses and for data that cannot be read, before any collective.
  Trainer(const TrainConfig& config, const World& world);

  void add(std::shared_ptr<MetricsSink> sink) { sinks_.push_back(std::move(sink)); }
  TrainResult run();

  // Parts of run(), for those who want to go step by step. A step whose verdict is to stop says so and leaves the
  // parameters as they were.
  struct StepOutcome {
    StepMetrics metrics;
    Sentinel::Verdict verdict;
  };
  StepOutcome step();
  EvalMetrics evaluate();
  std::string sample();  // a text, as the data show it

  Layout& layout() { return layout_; }
  const TrainConfig& config() const { return config_; }
  int64_t steps_made() const { return step_; }

 private:
  double mean_over_data(const at::Tensor& loss, double* greatest);
  void measure(StepMetrics& metrics, double seconds) const;

  TrainConfig config_;
  at::Device device_;
  data::Split data_;
  Layout layout_;
  std::unique_ptr<optim::AdamW> optimizer_;
  optim::LambdaLR schedule_;
  Step step_function_;
  Loader loader_;
  Sentinel sentinel_;
  std::vector<std::shared_ptr<MetricsSink>> sinks_;
  std::vector<int64_t> parameter_bytes_;  // of each rank
  double peak_tflops_;                    // of this rank's device; 0: not known
  int64_t step_ = 0, samples_read_ = 0;
};

}  // namespace tessera::train
