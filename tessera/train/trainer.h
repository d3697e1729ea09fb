#pragma once
#include "tessera/checkpoint/save.h"
#include "tessera/optim/schedulers.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/evaluate.h"
#include "tessera/train/detail/loader.h"
#include "tessera/train/detail/loss_monitor.h"
#include "tessera/train/detail/metrics.h"
#include "tessera/train/detail/parallel_model.h"
#include "tessera/train/detail/train_step.h"

#include <c10/core/Event.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

namespace train {
class EventFile;
}
namespace debug {
class StepProfiler;
}

// Writes TensorBoard event files from a training loop of yours (PyTorch: torch.utils.tensorboard.SummaryWriter). All
// ranks create it and make the same calls; rank 0 writes.
// Example:  ts::SummaryWriter writer("runs/1");
//           writer.add_scalar("loss", loss, step);
//           writer.add_histograms(*model, step);          // weights, and gradients after backward
class SummaryWriter {
 public:
  // Creates a file in `log_dir`.
  explicit SummaryWriter(const std::string& log_dir);
  ~SummaryWriter();
  // A number, the one of rank 0.
  void add_scalar(const std::string& tag, double value, int64_t step);
  // The values of a tensor. Of a distributed tensor each element counts once; all ranks of its mesh call it.
  void add_histogram(const std::string& tag, const at::Tensor& values, int64_t step);
  // The parameters ("weights/name") and their gradients ("gradients/name").
  void add_histograms(const torch::nn::Module& module, int64_t step);

 private:
  std::unique_ptr<train::EventFile> file_;  // of rank 0
};

}  // namespace tessera

namespace tessera::train {

// What Trainer::run() returns.
struct TrainResult {
  int64_t steps = 0;         // steps made, including those before a resumed checkpoint
  EvalMetrics eval = {};     // the last validation
  std::string sample = {};   // generated text
  std::string stopped = {};  // why training stopped early; empty: it completed
};

// The checkpoint that config.checkpoint.resume names, or the latest for "auto"; "" if not found. Reads no tensors.
// Throws UsageError if the checkpoint is not one of a trainer, or is of another model.
std::string find_checkpoint(const TrainConfig& config);

// A training run on all ranks of a world: model, optimizer, data, validation, metrics and checkpoints.
// Every rank constructs one and makes the same calls.
// Example:  const auto world = init();
//           Trainer trainer(config, world);
//           if (world.rank() == 0) trainer.add(std::make_shared<MetricsFile>(path));
//           auto result = trainer.run();
class Trainer {
 public:
  // Builds the model and, if the config names a checkpoint, resumes from it. Throws UsageError for a config that
  // check() rejects and for data that cannot be read, before any collective.
  Trainer(const TrainConfig& config, const World& world);
  ~Trainer();

  // Adds a destination for metrics. Usually only on rank 0.
  void add(std::shared_ptr<MetricsSink> sink) { sinks_.push_back(std::move(sink)); }
  // Trains up to config.training.steps, with validation and checkpoints, and generates a sample at the end.
  TrainResult run();

  // The metrics of a step, and whether the loss monitor accepted it.
  struct StepOutcome {
    StepMetrics metrics;           // of this step
    LossMonitor::Verdict verdict;  // Skip and Stop: the parameters were not updated
  };
  // Makes one step. run() calls it in a loop.
  StepOutcome step();
  // Computes loss and accuracy on the validation data.
  EvalMetrics evaluate();
  // Generates text from a prompt of the validation data.
  std::string sample();

  // Saves parameters, optimizer state, gradient scaler, data position and random state as a checkpoint.
  void save(const std::string& path);
  // Loads a checkpoint that was saved on any mesh. On the same mesh, training continues bit for bit as if it had not
  // been interrupted. Learning rate, data and number of steps come from the current config.
  // Requires: no step was made. Throws UsageError as find_checkpoint().
  void resume(const std::string& path);
  // The checkpoint that this trainer resumed from; "" if none.
  const std::string& resumed_from() const { return resumed_from_; }
  // Options of batch, data, schedule and mesh that differ from those of the resumed checkpoint, one line each, with
  // what the difference changes.
  const std::vector<std::string>& resume_changes() const { return resume_changes_; }

  // What the MFU in the metrics is a share of.
  const PeakRate& peak_rate() const { return peak_; }
  // Calls this in each step, when .grad has the gradient of the batch and before it is clipped.
  void set_gradient_hook(std::function<void()> hook) { train_step_.on_gradients = std::move(hook); }

  // The model on its mesh.
  ParallelModel& model() { return model_; }
  // The config.
  const TrainConfig& config() const { return config_; }
  // Steps made, including those before a resumed checkpoint.
  int64_t steps_made() const { return step_; }

 private:
  // A step whose numbers may still be on their way from the device.
  struct StartedStep {
    StepOutcome outcome;
    at::Tensor numbers;              // mean and largest loss, gradient norm; undefined: they are in the outcome
    std::optional<c10::Event> read;  // they are on the host
  };
  StartedStep start_step(bool may_read_later);
  void finish(StartedStep& step);
  void take_numbers(StepOutcome& outcome, const at::Tensor& numbers);
  bool can_read_later() const;
  bool must_read(int64_t step) const;
  at::Tensor is_bad(const at::Tensor& numbers);
  at::Tensor step_numbers(const StepResult& result);
  at::Tensor to_device(const at::Tensor& batch) const;
  void measure(StepMetrics& metrics, double seconds) const;
  void begin_profile();
  void end_profile();
  void save_if_due();
  void report_background_save();
  StateDict checkpoint_dict();
  dcp::Values checkpoint_values() const;

  World world_;
  TrainConfig config_;
  at::Device device_;
  data::Split data_;
  ParallelModel model_;
  std::unique_ptr<optim::AdamW> optimizer_;
  optim::LambdaLR scheduler_;
  TrainStep train_step_;
  Loader loader_;
  LossMonitor loss_monitor_;
  std::vector<std::shared_ptr<MetricsSink>> sinks_;
  std::vector<int64_t> parameter_bytes_;  // per rank
  PeakRate peak_;                         // of this rank's device
  int64_t step_ = 0, samples_read_ = 0;
  int64_t sampler_position_ = 0;
  std::string resumed_from_;
  std::vector<std::string> resume_changes_;
  dcp::AsyncSave saving_;         // with checkpoint.async: the last checkpoint
  bool saving_reported_ = false;  // the sinks know that it is complete
  std::unique_ptr<debug::StepProfiler> profiler_;
  int64_t steps_of_run_ = 0;  // since the start or the resume
  at::Tensor stopped_;        // on the device: 1 from the first bad step on, if such a step stops the run
};

}  // namespace tessera::train
