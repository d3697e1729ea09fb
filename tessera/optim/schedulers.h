#pragma once
#include "tessera/optim/optimizer.h"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

// Learning-rate schedulers with PyTorch's names, arguments and values, for optimizers of tessera::optim and
// torch::optim. Call step() after the optimizer's step(). They run on the host. A tensor learning rate is written in
// place, so a compiled step sees the new value. In a compiled step, call step() after the optimizer's step(); it then
// runs after each run of the program.
//
// Example:  optim::CosineAnnealingLR schedule(opt, total_steps, 1e-5);
//           optim::LambdaLR schedule(opt, optim::cosine_with_warmup(100, 10'000));
namespace tessera::optim {

// Base class of all schedulers.
class LRScheduler {
 public:
  virtual ~LRScheduler() = default;
  LRScheduler(const LRScheduler&) = delete;

  // Sets the next learning rate of all groups.
  virtual void step();
  // Number of steps; 0 after construction.
  int64_t last_epoch() const {
    note_read();
    return last_epoch_;
  }
  // The present learning rates by group.
  const std::vector<double>& last_lr() const {
    note_read();
    return last_lr_;
  }
  // The optimizer that this scheduler controls.
  torch::optim::Optimizer& optimizer() const { return optimizer_; }

  // The position in the schedule, not the schedule itself: load it into a scheduler with the same arguments. The
  // learning rate is part of the optimizer's state.
  virtual StateDict state_dict() const;
  // Restores the position. Throws UsageError, and changes nothing, if a name is missing or a size is wrong.
  virtual void load_state_dict(const StateDict& dict);

 protected:
  // Requires: the optimizer outlives the scheduler. The constructor of the derived class calls start().
  explicit LRScheduler(torch::optim::Optimizer& optimizer);
  // Sets the first learning rate.
  void start();

  // The next learning rate of a group, computed from its present one.
  virtual double next(size_t group, double lr) const = 0;
  // The closed form: the learning rate at last_epoch, from the initial one alone. None if there is only next().
  virtual std::optional<double> at_epoch(size_t) const { return std::nullopt; }

  // While a step is traced: registers step() for each run, and returns true.
  bool step_in_each_run();

  torch::optim::Optimizer& optimizer_;
  std::vector<double> base_lr_, last_lr_;
  int64_t last_epoch_ = -1;
  int64_t step_count_ = 0;
  bool starting_ = false;

 private:
  friend class SequentialLR;
  void update(std::optional<int64_t> epoch);
  double lr(size_t group) const;
  void set_lr(size_t group, double lr);
  void note_read() const;        // in a traced step: a guard
  size_t stepped_in_trace_ = 0;  // CompilingScope::serial() of the trace
  Optimizer* own_;               // optimizer_ as one of tessera::optim, or nullptr
};

// Multiplies the learning rate by gamma every `step_size` steps.
class StepLR final : public LRScheduler {
 public:
  // Requires: step_size > 0.
  StepLR(torch::optim::Optimizer& optimizer, int64_t step_size, double gamma = 0.1);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  int64_t step_size_;
  double gamma_;
};

// Multiplies the learning rate by gamma at each milestone.
class MultiStepLR final : public LRScheduler {
 public:
  // Milestones are step numbers, in any order.
  MultiStepLR(torch::optim::Optimizer& optimizer, std::vector<int64_t> milestones, double gamma = 0.1);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  std::vector<int64_t> milestones_;  // ascending
  double gamma_;
};

// Multiplies the initial learning rate by `factor` during the first `total_iters` steps.
class ConstantLR final : public LRScheduler {
 public:
  // Requires: 0 < factor <= 1.
  explicit ConstantLR(torch::optim::Optimizer& optimizer, double factor = 1.0 / 3, int64_t total_iters = 5);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  double factor_;
  int64_t total_iters_;
};

// Multiplies the initial learning rate by a factor that changes linearly from start to end within `total_iters` steps.
class LinearLR final : public LRScheduler {
 public:
  // Requires: 0 < start_factor <= 1, 0 <= end_factor <= 1, total_iters > 0.
  explicit LinearLR(torch::optim::Optimizer& optimizer, double start_factor = 1.0 / 3, double end_factor = 1.0,
                    int64_t total_iters = 5);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  double start_, end_;
  int64_t total_iters_;
};

// Multiplies the learning rate by gamma in every step.
class ExponentialLR final : public LRScheduler {
 public:
  // lr = initial lr * gamma^step
  ExponentialLR(torch::optim::Optimizer& optimizer, double gamma);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  double gamma_;
};

// Half a cosine from the initial learning rate down to eta_min within t_max steps, and up again.
class CosineAnnealingLR final : public LRScheduler {
 public:
  // Requires: t_max > 0.
  CosineAnnealingLR(torch::optim::Optimizer& optimizer, int64_t t_max, double eta_min = 0);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  int64_t t_max_;
  double eta_min_;
};

// Multiplies the initial learning rate by factor(last_epoch).
class LambdaLR final : public LRScheduler {
 public:
  // From the number of steps to a factor.
  using Factor = std::function<double(int64_t)>;
  // One function for all groups.
  LambdaLR(torch::optim::Optimizer& optimizer, Factor factor);
  // One function per group.
  LambdaLR(torch::optim::Optimizer& optimizer, std::vector<Factor> factors);

 private:
  double next(size_t group, double lr) const override;
  std::vector<Factor> factors_;
};

// Runs schedulers one after the other; each milestone is the step at which the next one starts.
class SequentialLR final : public LRScheduler {
 public:
  // Requires: all schedulers were created with this optimizer, in this order; one milestone between two schedulers.
  SequentialLR(torch::optim::Optimizer& optimizer, std::vector<std::shared_ptr<LRScheduler>> schedulers,
               std::vector<int64_t> milestones);
  // See LRScheduler. The state includes that of all schedulers.
  void step() override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& dict) override;

 private:
  double next(size_t, double lr) const override { return lr; }
  size_t index_at(int64_t epoch) const;
  std::vector<std::shared_ptr<LRScheduler>> schedulers_;
  std::vector<int64_t> milestones_;
};

// Factors for LambdaLR. Both rise from 0 to 1 within `warmup` steps and end at `floor`.
//
//   cosine_with_warmup   /~~-..__       half a cosine over the remaining steps of `total`
//   warmup_stable_decay  /~~~~~~\_      1 for `stable` steps, then linear over `decay` steps
LambdaLR::Factor cosine_with_warmup(int64_t warmup, int64_t total, double floor = 0);
LambdaLR::Factor warmup_stable_decay(int64_t warmup, int64_t stable, int64_t decay, double floor = 0);

// Options of find_lr.
struct FindLROptions {
  double min_lr = 1e-8, max_lr = 1;  // the first and the last learning rate
  int64_t steps = 100;               // the learning rate grows by one factor per step
  double early_stop_threshold = 4;   // ends when the smoothed loss is this many times the best one
  double smoothing = 0.95;           // of the exponential average of losses
};
// The result of find_lr.
struct FindLRResult {
  std::vector<double> lrs, losses;  // of the steps that were made
  double suggestion = 0;            // where the smoothed loss falls most steeply; 0 if it never falls
};
// The learning-rate range test: trains with growing learning rates, and restores the module and the optimizer. `step`
// makes one step of the training with the next batch and returns the loss, the same on all ranks (mean_over_ranks).
// Example:  auto step = [&] { return train_step(model, optimizer, next_batch()).item<double>(); };
//           auto found = optim::find_lr(*model, optimizer, step);
//           optimizer.set_lr(0, found.suggestion);
FindLRResult find_lr(torch::nn::Module& module, torch::optim::Optimizer& optimizer, const std::function<double()>& step,
                     const FindLROptions& options = {});

}  // namespace tessera::optim
