#pragma once
#include "tessera/optim/schedulers.h"
#include "tessera/train/detail/evaluate.h"
#include "tessera/train/detail/model_layout.h"
#include "tessera/train/detail/loader.h"
#include "tessera/train/detail/metrics.h"
#include "tessera/train/detail/sentinel.h"
#include "tessera/train/detail/train_step.h"

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

// The checkpoint that a config asks to go on from; "" if there is none. UsageError for one of another model, or of no
// training. Reads no tensors.
std::string find_checkpoint(const TrainConfig& config);

// A training from start to end, on the ranks of a world. Every rank makes one and makes the same calls.
// Example:  Trainer trainer(config, init());
//           if (world.rank() == 0) trainer.add(std::make_shared<MetricsFile>(path));
//           auto result = trainer.run();
class Trainer {
 public:
  // Throws UsageError for a config that check() refuses and for data that cannot be read, before any collective. Where
  // the config asks for it, it goes on from a checkpoint.
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

  // Parameters, optimizer, scaler and all that says where the training is, as a checkpoint of this name.
  void save(const std::string& path);
  // Goes on from one, saved on any mesh. On the mesh that saved it all that follows is as if it had not been left, to
  // the bit. What the config says of learning rates, data and steps counts, not what it was.
  // Throws UsageError for a checkpoint of another model, or of no training.
  void resume(const std::string& path);
  const std::string& resumed_from() const { return resumed_from_; }  // "" if it began at the beginning

  Layout& layout() { return layout_; }
  const TrainConfig& config() const { return config_; }
  int64_t steps_made() const { return step_; }

 private:
  double mean_over_data(const at::Tensor& loss, double* greatest);
  void measure(StepMetrics& metrics, double seconds) const;

  void save_when_due();

  World world_;
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
  int64_t position_ = 0;  // of the sampler
  std::string resumed_from_;
};

}  // namespace tessera::train
