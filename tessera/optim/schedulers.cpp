#include "tessera/optim/schedulers.h"

#include "tessera/base/error.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <cmath>
#include <numbers>

// Most schedulers compute the next value from the present one, as PyTorch does. So they can be chained, and the values
// are bitwise equal to PyTorch's. The order of operations matters; int64_t is used where Python has an int.
namespace tessera::optim {
namespace {

double to_double(int64_t n) { return static_cast<double>(n); }

int64_t count(const std::vector<int64_t>& sorted, int64_t value) {
  const auto [first, last] = std::equal_range(sorted.begin(), sorted.end(), value);
  return last - first;
}
int64_t count_up_to(const std::vector<int64_t>& sorted, int64_t value) {
  return std::upper_bound(sorted.begin(), sorted.end(), value) - sorted.begin();
}

void check_positive(const char* kind, const char* name, int64_t value) {
  TESSERA_CHECK(value > 0, UsageError, kind, ": ", name, " must be greater than 0; found ", value);
}
void check_factor(const char* kind, const char* name, double value, bool allow_zero) {
  TESSERA_CHECK(value <= 1 && (allow_zero ? value >= 0 : value > 0), UsageError, kind, ": ", name, " must be ",
                allow_zero ? "at least" : "greater than", " 0 and at most 1; found ", value);
}

}  // namespace

// ---- LRScheduler

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer)
    : optimizer_(optimizer), own_(dynamic_cast<Optimizer*>(&optimizer)) {
  for (size_t g = 0; g < optimizer.param_groups().size(); g++) base_lr_.push_back(own_ ? own_->initial_lr(g) : lr(g));
}

double LRScheduler::lr(size_t group) const {
  return own_ ? own_->lr(group) : optimizer_.param_groups()[group].options().get_lr();
}

void LRScheduler::set_lr(size_t group, double lr) {
  if (own_)
    own_->set_lr(group, lr);
  else
    optimizer_.param_groups()[group].options().set_lr(lr);
}

void LRScheduler::start() {
  step_count_ = 0;
  starting_ = true;
  LRScheduler::step();
  starting_ = false;
}

bool LRScheduler::step_in_each_run() {
  if (!compiling() || starting_) return false;
  stepped_in_trace_ = CompilingScope::serial();
  if (own_) own_->scheduled_in_trace();
  CompilingScope::on_replay([this] { step(); });
  return true;
}

void LRScheduler::note_read() const {
  if (!compiling()) return;
  TESSERA_CHECK(
      stepped_in_trace_ != CompilingScope::serial(), UsageError,
      "the compiled step reads last_lr() or last_epoch() of a scheduler after its step(), which runs after the "
      "program; read it before step(), or outside of the compiled step");
  CompilingScope::add_guard([this] { return last_epoch_; });
}

void LRScheduler::step() {
  if (step_in_each_run()) return;
  TESSERA_CHECK(optimizer_.param_groups().size() == base_lr_.size(), UsageError, "the scheduler was created for ",
                base_lr_.size(), " parameter groups, and the optimizer now has ", optimizer_.param_groups().size(),
                "; create it after the last add_param_group()");
  step_count_++;
  update(std::nullopt);
}

void LRScheduler::update(std::optional<int64_t> epoch) {
  last_epoch_ = epoch.value_or(last_epoch_ + 1);
  last_lr_.clear();
  for (size_t g = 0; g < base_lr_.size(); g++) {
    const auto closed = epoch ? at_epoch(g) : std::nullopt;
    last_lr_.push_back(closed ? *closed : next(g, lr(g)));
    set_lr(g, last_lr_.back());
  }
}

StateDict LRScheduler::state_dict() const {
  return {{"last_epoch", at::scalar_tensor(last_epoch_, at::kLong)},
          {"step_count", at::scalar_tensor(step_count_, at::kLong)},
          {"base_lr", at::tensor(base_lr_, at::kDouble)},
          {"last_lr", at::tensor(last_lr_, at::kDouble)}};
}

void LRScheduler::load_state_dict(const StateDict& dict) {
  const auto read_list = [&](const char* name) {
    const auto& t = dict.at(name);
    TESSERA_CHECK(t.numel() == static_cast<int64_t>(base_lr_.size()), UsageError, "the scheduler state '", name,
                  "' has ", t.numel(), " elements, and the optimizer has ", base_lr_.size(), " parameter groups");
    std::vector<double> values;
    for (int64_t i = 0; i < t.numel(); i++) values.push_back(t[i].item<double>());
    return values;
  };
  auto base = read_list("base_lr"), last = read_list("last_lr");
  const auto epoch = dict.at("last_epoch").item<int64_t>(), steps = dict.at("step_count").item<int64_t>();
  base_lr_ = std::move(base);
  last_lr_ = std::move(last);
  last_epoch_ = epoch;
  step_count_ = steps;
}

// ---- the schedulers

StepLR::StepLR(torch::optim::Optimizer& optimizer, int64_t step_size, double gamma)
    : LRScheduler(optimizer), step_size_(step_size), gamma_(gamma) {
  check_positive("StepLR", "step_size", step_size);
  start();
}
double StepLR::next(size_t, double lr) const {
  return last_epoch_ == 0 || last_epoch_ % step_size_ != 0 ? lr : lr * gamma_;
}
std::optional<double> StepLR::at_epoch(size_t group) const {
  return base_lr_[group] * std::pow(gamma_, to_double(last_epoch_ / step_size_));
}

MultiStepLR::MultiStepLR(torch::optim::Optimizer& optimizer, std::vector<int64_t> milestones, double gamma)
    : LRScheduler(optimizer), milestones_(std::move(milestones)), gamma_(gamma) {
  std::sort(milestones_.begin(), milestones_.end());
  start();
}
double MultiStepLR::next(size_t, double lr) const {
  const auto times = count(milestones_, last_epoch_);
  return times == 0 ? lr : lr * std::pow(gamma_, to_double(times));
}
std::optional<double> MultiStepLR::at_epoch(size_t group) const {
  return base_lr_[group] * std::pow(gamma_, to_double(count_up_to(milestones_, last_epoch_)));
}

ConstantLR::ConstantLR(torch::optim::Optimizer& optimizer, double factor, int64_t total_iters)
    : LRScheduler(optimizer), factor_(factor), total_iters_(total_iters) {
  check_factor("ConstantLR", "factor", factor, false);  // PyTorch accepts 0, and divides by it at the end
  start();
}
double ConstantLR::next(size_t, double lr) const {
  if (last_epoch_ == 0) return lr * factor_;
  return last_epoch_ != total_iters_ ? lr : lr * (1.0 / factor_);
}
std::optional<double> ConstantLR::at_epoch(size_t group) const {
  return base_lr_[group] * (factor_ + (last_epoch_ >= total_iters_ ? 1.0 : 0.0) * (1 - factor_));
}

LinearLR::LinearLR(torch::optim::Optimizer& optimizer, double start_factor, double end_factor, int64_t total_iters)
    : LRScheduler(optimizer), start_(start_factor), end_(end_factor), total_iters_(total_iters) {
  check_factor("LinearLR", "start_factor", start_factor, false);
  check_factor("LinearLR", "end_factor", end_factor, true);
  check_positive("LinearLR", "total_iters", total_iters);
  start();
}
double LinearLR::next(size_t, double lr) const {
  if (last_epoch_ == 0) return lr * start_;
  if (starting_ || last_epoch_ > total_iters_) return lr;
  return lr *
         (1.0 + (end_ - start_) / (to_double(total_iters_) * start_ + to_double(last_epoch_ - 1) * (end_ - start_)));
}
std::optional<double> LinearLR::at_epoch(size_t group) const {
  return base_lr_[group] *
         (start_ + (end_ - start_) * to_double(std::min(total_iters_, last_epoch_)) / to_double(total_iters_));
}

ExponentialLR::ExponentialLR(torch::optim::Optimizer& optimizer, double gamma) : LRScheduler(optimizer), gamma_(gamma) {
  start();
}
double ExponentialLR::next(size_t, double lr) const { return starting_ ? lr : lr * gamma_; }
std::optional<double> ExponentialLR::at_epoch(size_t group) const {
  return base_lr_[group] * std::pow(gamma_, to_double(last_epoch_));
}

CosineAnnealingLR::CosineAnnealingLR(torch::optim::Optimizer& optimizer, int64_t t_max, double eta_min)
    : LRScheduler(optimizer), t_max_(t_max), eta_min_(eta_min) {
  check_positive("CosineAnnealingLR", "t_max", t_max);
  start();
}
double CosineAnnealingLR::next(size_t group, double lr) const {
  constexpr double pi = std::numbers::pi;
  if (starting_) return lr;
  if ((last_epoch_ - 1 - t_max_) % (2 * t_max_) == 0)  // the minimum: the quotient below would be 0 / 0
    return lr + (base_lr_[group] - eta_min_) * (1 - std::cos(pi / to_double(t_max_))) / 2;
  return (1 + std::cos(pi * to_double(last_epoch_) / to_double(t_max_))) /
             (1 + std::cos(pi * to_double(last_epoch_ - 1) / to_double(t_max_))) * (lr - eta_min_) +
         eta_min_;
}
std::optional<double> CosineAnnealingLR::at_epoch(size_t group) const {
  return eta_min_ + (base_lr_[group] - eta_min_) *
                        (1 + std::cos(std::numbers::pi * to_double(last_epoch_) / to_double(t_max_))) / 2;
}

LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, Factor factor)
    : LambdaLR(optimizer, std::vector<Factor>(optimizer.param_groups().size(), factor)) {}
LambdaLR::LambdaLR(torch::optim::Optimizer& optimizer, std::vector<Factor> factors)
    : LRScheduler(optimizer), factors_(std::move(factors)) {
  TESSERA_CHECK(factors_.size() == optimizer.param_groups().size(), UsageError, "LambdaLR: ", factors_.size(),
                " functions were given for ", optimizer.param_groups().size(), " parameter groups");
  start();
}
double LambdaLR::next(size_t group, double) const { return base_lr_[group] * factors_[group](last_epoch_); }

// ---- SequentialLR

SequentialLR::SequentialLR(torch::optim::Optimizer& optimizer, std::vector<std::shared_ptr<LRScheduler>> schedulers,
                           std::vector<int64_t> milestones)
    : LRScheduler(optimizer), schedulers_(std::move(schedulers)), milestones_(std::move(milestones)) {
  TESSERA_CHECK(!schedulers_.empty() && milestones_.size() + 1 == schedulers_.size(), UsageError,
                "SequentialLR: ", schedulers_.size(), " schedulers and ", milestones_.size(),
                " milestones were given; pass one milestone between each two schedulers");
  TESSERA_CHECK(std::is_sorted(milestones_.begin(), milestones_.end()), UsageError,
                "SequentialLR: milestones must be in ascending order; found ", c10::IntArrayRef(milestones_));
  for (size_t i = 0; i < schedulers_.size(); i++) {
    TESSERA_CHECK(schedulers_[i] && &schedulers_[i]->optimizer_ == &optimizer, UsageError, "SequentialLR: scheduler ",
                  i, " belongs to another optimizer");
    TESSERA_CHECK(!dynamic_cast<SequentialLR*>(schedulers_[i].get()), UsageError, "SequentialLR: scheduler ", i,
                  " is a SequentialLR itself; pass its schedulers and milestones instead");
  }
  // Each constructor has set the learning rate. Undoes this for all but the first scheduler. An optimizer of
  // torch::optim does not record its initial learning rates: the first scheduler has them.
  base_lr_ = schedulers_[0]->base_lr_;
  for (size_t g = 0; g < base_lr_.size(); g++) set_lr(g, base_lr_[g]);
  for (const auto& scheduler : schedulers_) {
    scheduler->base_lr_ = base_lr_;
    scheduler->last_epoch_--;
  }
  last_epoch_ = 0;
  auto& first = *schedulers_[index_at(0)];
  first.start();
  last_lr_ = first.last_lr_;
}

size_t SequentialLR::index_at(int64_t epoch) const { return static_cast<size_t>(count_up_to(milestones_, epoch)); }

void SequentialLR::step() {
  if (step_in_each_run()) return;
  last_epoch_++;
  const size_t i = index_at(last_epoch_);
  auto& scheduler = *schedulers_[i];
  if (i > 0 && milestones_[i - 1] == last_epoch_)
    scheduler.update(0);
  else
    scheduler.step();
  last_lr_ = scheduler.last_lr_;
}

StateDict SequentialLR::state_dict() const {
  auto dict = LRScheduler::state_dict();
  for (size_t i = 0; i < schedulers_.size(); i++)
    dict.insert_all(c10::str("schedulers.", i, "."), schedulers_[i]->state_dict());
  return dict;
}

void SequentialLR::load_state_dict(const StateDict& dict) {
  const auto before = state_dict();
  try {
    for (size_t i = 0; i < schedulers_.size(); i++)
      schedulers_[i]->load_state_dict(dict.under(c10::str("schedulers.", i, ".")));
    LRScheduler::load_state_dict(dict);
  } catch (...) {  // restores what was already loaded
    for (size_t i = 0; i < schedulers_.size(); i++)
      schedulers_[i]->load_state_dict(before.under(c10::str("schedulers.", i, ".")));
    throw;
  }
}

// ---- factors

LambdaLR::Factor cosine_with_warmup(int64_t warmup, int64_t total, double floor) {
  TESSERA_CHECK(warmup >= 0 && total > warmup, UsageError, "cosine_with_warmup: ", warmup, " warm-up steps of ", total,
                "; the warm-up must be at least 0 and less than the total");
  return [=](int64_t step) {
    if (step < warmup) return to_double(step) / to_double(warmup);
    const double progress = std::min(1.0, to_double(step - warmup) / to_double(total - warmup));
    return floor + (1 - floor) * (1 + std::cos(std::numbers::pi * progress)) / 2;
  };
}

LambdaLR::Factor warmup_stable_decay(int64_t warmup, int64_t stable, int64_t decay, double floor) {
  TESSERA_CHECK(warmup >= 0 && stable >= 0 && decay > 0, UsageError, "warmup_stable_decay: ", warmup, ", ", stable,
                " and ", decay, " steps were given; warmup and stable must be at least 0, decay greater than 0");
  return [=](int64_t step) {
    if (step < warmup) return to_double(step) / to_double(warmup);
    if (step < warmup + stable) return 1.0;
    const double progress = std::min(1.0, to_double(step - warmup - stable) / to_double(decay));
    return 1 - (1 - floor) * progress;
  };
}

}  // namespace tessera::optim
