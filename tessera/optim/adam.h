#pragma once
#include "tessera/optim/learning_rate.h"
#include "tessera/optim/optimizer.h"

#include <array>

namespace tessera::optim {

struct AdamOptions {
  LearningRate lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled_weight_decay = false;  // true: AdamW
  std::optional<bool> foreach = {};     // false: one parameter after the other. The same bits.
  bool fused = false;                   // one kernel for all; its rounding is its own
};

struct AdamWOptions {
  LearningRate lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  bool amsgrad = false;
  bool maximize = false;
  std::optional<bool> foreach = {};
  bool fused = false;

  AdamOptions as_adam() const;
};

// Adam with PyTorch's arithmetic to the bit.
//
//   t <- t + 1      m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t)  m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// with g + weight_decay p for g, or, decoupled, p first multiplied by 1 - lr weight_decay. amsgrad: the largest v so
// far in place of v. t is a float tensor for each parameter, the corrections are computed from it as tensors. Example:
// optim::Adam opt(model->parameters(), {.lr = 1e-3});
class Adam : public Optimizer {
 public:
  using Options = AdamOptions;
  using Group = ParamGroup<Options>;

  explicit Adam(const Tensors& params, const Options& options = {}) : Adam(std::vector<Group>{{params, options}}) {}
  explicit Adam(const std::vector<Group>& groups);
  void add_param_group(const Group& group);  // UsageError leaves it as it was
  const Options& group_options(size_t group) const { return options_.at(group); }
  void set_group_options(size_t group, const Options& options);

  double lr(size_t group) const override { return options_.at(group).lr.number(); }
  void set_lr(size_t group, double lr) override { options_.at(group).lr.set(lr); }
  bool is_fused(size_t group) const override { return options_.at(group).fused; }
  std::string kind() const override { return "Adam"; }
  StateDict options(size_t group) const override;
  void set_options(size_t group, const StateDict& dict) override;
  std::vector<Row> rows() const override;

 protected:
  Adam() = default;

 private:
  void complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const override;
  size_t rows_used(size_t group) const override { return options_[group].amsgrad ? 4 : 3; }
  void update(size_t group, Bundle& bundle, const Scaling* scaling) override;
  at::Device step_device(size_t group, const at::Tensor& parameter) const override;
  static void update_list(const Options& options, Bundle& bundle);
  static void update_fused(const Options& options, Bundle& bundle, const Scaling* scaling);

  std::vector<Options> options_;
};

// Adam with weight decay decoupled from the gradient, 0.01 unless told.
// Example:  optim::AdamW opt(model->parameters(), {.lr = 3e-4, .fused = true});
//           optim::AdamW opt({{matrices, {.weight_decay = 0.1}}, {vectors, {.weight_decay = 0}}});
class AdamW final : public Adam {
 public:
  using Options = AdamWOptions;
  using Group = ParamGroup<Options>;

  explicit AdamW(const Tensors& params, const Options& options = {}) : AdamW(std::vector<Group>{{params, options}}) {}
  explicit AdamW(const std::vector<Group>& groups);
  void add_param_group(const Group& group) { Adam::add_param_group({group.params, group.options.as_adam()}); }
  void set_group_options(size_t group, const Options& options) { Adam::set_group_options(group, options.as_adam()); }
  std::string kind() const override { return "AdamW"; }
};

}  // namespace tessera::optim
