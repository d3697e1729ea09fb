#pragma once
#include "tessera/optim/optimizer.h"

#include <functional>
#include <memory>
#include <optional>
#include <vector>

// Learning-rate schedulers with PyTorch's names, arguments and values. Call step() after the optimizer's. They work on
// the host; a learning rate that is a tensor is written into, so a compiled step sees the new value.
//
// Example:  optim::CosineAnnealingLR schedule(opt, total_steps, 1e-5);
//           optim::LambdaLR schedule(opt, optim::cosine_with_warmup(100, 10'000));
namespace tessera::optim {

class LRScheduler {
 public:
  virtual ~LRScheduler() = default;
  LRScheduler(const LRScheduler&) = delete;

  virtual void step();
  int64_t last_epoch() const { return last_epoch_; }  // steps made; 0 after construction
  const std::vector<double>& last_lr() const { return last_lr_; }
  Optimizer& optimizer() const { return optimizer_; }

  // Where it is, not which schedule it is: load into one made with the same arguments. The optimizer's own state has
  // the learning rate. Loading throws UsageError, and changes nothing, if a name is missing or does not fit.
  virtual StateDict state_dict() const;
  virtual void load_state_dict(const StateDict& dict);

 protected:
  explicit LRScheduler(
      Optimizer& optimizer);  // requires: the optimizer outlives it. The class made last calls start().
  void start();

  // The next learning rate of a group that has `lr` now.
  virtual double next(size_t group, double lr) const = 0;
  // That at last_epoch, from the first one alone; none: next() knows no other way.
  virtual std::optional<double> at_epoch(size_t) const { return std::nullopt; }

  Optimizer& optimizer_;
  std::vector<double> base_lr_, last_lr_;
  int64_t last_epoch_ = -1;
  int64_t step_count_ = 0;
  bool starting_ = false;

 private:
  friend class SequentialLR;
  void update(std::optional<int64_t> epoch);
};

// times gamma every `step_size` steps
class StepLR final : public LRScheduler {
 public:
  StepLR(Optimizer& optimizer, int64_t step_size, double gamma = 0.1);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  int64_t step_size_;
  double gamma_;
};

// times gamma at each milestone
class MultiStepLR final : public LRScheduler {
 public:
  MultiStepLR(Optimizer& optimizer, std::vector<int64_t> milestones, double gamma = 0.1);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  std::vector<int64_t> milestones_;  // ascending
  double gamma_;
};

// times factor for the first total_iters steps
class ConstantLR final : public LRScheduler {
 public:
  explicit ConstantLR(Optimizer& optimizer, double factor = 1.0 / 3, int64_t total_iters = 5);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  double factor_;
  int64_t total_iters_;
};

// times a factor that goes from start to end in total_iters steps
class LinearLR final : public LRScheduler {
 public:
  explicit LinearLR(Optimizer& optimizer, double start_factor = 1.0 / 3, double end_factor = 1.0,
                    int64_t total_iters = 5);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  double start_, end_;
  int64_t total_iters_;
};

// times gamma every step
class ExponentialLR final : public LRScheduler {
 public:
  ExponentialLR(Optimizer& optimizer, double gamma);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  double gamma_;
};

// half a cosine from the first one down to eta_min in t_max steps, and up again
class CosineAnnealingLR final : public LRScheduler {
 public:
  CosineAnnealingLR(Optimizer& optimizer, int64_t t_max, double eta_min = 0);

 private:
  double next(size_t group, double lr) const override;
  std::optional<double> at_epoch(size_t group) const override;
  int64_t t_max_;
  double eta_min_;
};

// times factor(steps made): one function for all groups, or one for each
class LambdaLR final : public LRScheduler {
 public:
  using Factor = std::function<double(int64_t)>;
  LambdaLR(Optimizer& optimizer, Factor factor);
  LambdaLR(Optimizer& optimizer, std::vector<Factor> factors);

 private:
  double next(size_t group, double lr) const override;
  std::vector<Factor> factors_;
};

// One scheduler after the other, the next from each milestone on. All were made with the same optimizer, in this order.
class SequentialLR final : public LRScheduler {
 public:
  SequentialLR(Optimizer& optimizer, std::vector<std::shared_ptr<LRScheduler>> schedulers,
               std::vector<int64_t> milestones);
  void step() override;
  StateDict state_dict() const override;
  void load_state_dict(const StateDict& dict) override;

 private:
  double next(size_t, double lr) const override { return lr; }
  size_t at(int64_t epoch) const;
  std::vector<std::shared_ptr<LRScheduler>> schedulers_;
  std::vector<int64_t> milestones_;
};

// Factors for LambdaLR. Both rise from 0 to 1 in `warmup` steps and end at `floor`.
//
//   cosine_with_warmup   /~~-..__       half a cosine over the steps that remain of `total`
//   warmup_stable_decay  /~~~~~~\_      1 for `stable` steps, then a line down over `decay` steps
LambdaLR::Factor cosine_with_warmup(int64_t warmup, int64_t total, double floor = 0);
LambdaLR::Factor warmup_stable_decay(int64_t warmup, int64_t stable, int64_t decay, double floor = 0);

}  // namespace tessera::optim
