#pragma once
#include "tessera/optim/learning_rate.h"
#include "tessera/optim/optimizer.h"

namespace tessera::optim {

struct SGDOptions {
  LearningRate lr = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  bool maximize = false;
  std::optional<bool> foreach = {};  // false: one parameter after the other. The same bits.
  bool fused = false;                // one kernel for all; its rounding is its own
};

// Stochastic gradient descent with PyTorch's arithmetic, to the bit for a learning rate that is a number.
//
//   g <- g + weight_decay p      buf <- g the first time, then momentum buf + (1 - dampening) g
//   p <- p - lr buf              Nesterov: p <- p - lr (g + momentum buf)        no momentum: p <- p - lr g
//
// Example:  optim::SGD opt(model->parameters(), {.lr = 0.1, .momentum = 0.9});
class SGD final : public Optimizer {
 public:
  using Options = SGDOptions;
  using Group = ParamGroup<Options>;

  explicit SGD(const Tensors& params, const Options& options = {}) : SGD(std::vector<Group>{{params, options}}) {}
  explicit SGD(const std::vector<Group>& groups);
  void add_param_group(const Group& group);  // UsageError leaves it as it was
  const Options& group_options(size_t group) const { return options_.at(group); }
  void set_group_options(size_t group, const Options& options);

  double lr(size_t group) const override { return options_.at(group).lr.number(); }
  void set_lr(size_t group, double lr) override { options_.at(group).lr.set(lr); }
  bool is_fused(size_t group) const override { return options_.at(group).fused; }
  std::string kind() const override { return "SGD"; }
  StateDict options(size_t group) const override;
  void set_options(size_t group, const StateDict& dict) override;
  std::vector<Row> rows() const override { return {{"momentum_buffer"}}; }

 private:
  void complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const override;
  size_t rows_used(size_t group) const override { return options_[group].momentum != 0; }
  void update(size_t group, Bundle& bundle, const Scaling* scaling) override;
  static void update_list(const Options& options, Bundle& bundle);
  static void update_fused(const Options& options, Bundle& bundle, const Scaling* scaling);

  std::vector<Options> options_;
};

}  // namespace tessera::optim
