#pragma once
#include "tessera/optim/detail/learning_rate.h"
#include "tessera/optim/detail/optimizer_of.h"

#include <array>

namespace tessera::optim {

namespace detail {

// The options of Adam and AdamW that are saved in a state dict.
template <class Options, class F>
void visit_adam_options(Options& o, F f) {
  f("lr", o.lr);
  f("betas", o.betas);
  f("eps", o.eps);
  f("weight_decay", o.weight_decay);
  f("amsgrad", o.amsgrad);
  f("maximize", o.maximize);
}

}  // namespace detail

// Options of Adam, with the names and defaults of torch.optim.Adam.
struct AdamOptions {
  LearningRate lr = 1e-3;                      // a number or a tensor of one element
  std::array<double, 2> betas = {0.9, 0.999};  // decay rates of the averages of g and of g^2
  double eps = 1e-8;                           // is added to the denominator
  double weight_decay = 0;                     // L2 penalty
  bool amsgrad = false;                        // use the maximum of all v so far
  bool maximize = false;                       // maximize the objective instead of minimizing it
  bool decoupled_weight_decay = false;  // decay weights as AdamW does; not saved, because it selects the algorithm
  std::optional<bool> foreach = {};     // false: one parameter after the other; the results are bitwise equal
  bool fused = false;                   // one fused kernel per list of parameters; rounds differently

  // Name of the optimizer in messages and state dicts.
  static constexpr const char* kKind = "Adam";
  // Throws UsageError for values out of range.
  void check() const;
  // Calls f(name, value) for each option that is saved.
  template <class Self, class F>
  static void visit(Self& o, F f) {
    detail::visit_adam_options(o, f);
  }
};

// Options of AdamW, with the names and defaults of torch.optim.AdamW.
struct AdamWOptions {
  LearningRate lr = 1e-3;                      // a number or a tensor of one element
  std::array<double, 2> betas = {0.9, 0.999};  // decay rates of the averages of g and of g^2
  double eps = 1e-8;                           // is added to the denominator
  double weight_decay = 1e-2;                  // each step multiplies p by 1 - lr weight_decay
  bool amsgrad = false;                        // use the maximum of all v so far
  bool maximize = false;                       // maximize the objective instead of minimizing it
  std::optional<bool> foreach = {};            // false: one parameter after the other; the results are bitwise equal
  bool fused = false;                          // one fused kernel per list of parameters; rounds differently

  // Weight decay is always decoupled from the gradient.
  static constexpr bool decoupled_weight_decay = true;
  // Name of the optimizer in messages and state dicts.
  static constexpr const char* kKind = "AdamW";
  // Throws UsageError for values out of range.
  void check() const;
  // Calls f(name, value) for each option that is saved.
  template <class Self, class F>
  static void visit(Self& o, F f) {
    detail::visit_adam_options(o, f);
  }
};

// Adam, bitwise equal to PyTorch's.
//
//   t <- t + 1      m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t)  m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// g is replaced by g + weight_decay p; with decoupled weight decay p is first multiplied by 1 - lr weight_decay
// instead. amsgrad: uses the largest v so far in place of v. t is one float tensor per parameter; the bias corrections
// are computed from it as tensors.
// Example:  optim::Adam opt(model->parameters(), {.lr = 1e-3});
template <class Options>
class AdamOf final : public OptimizerOf<Options> {
  using StateEntry = OptimizerAccess::StateEntry;
  using TensorLists = Optimizer::TensorLists;
  using Scaling = Optimizer::Scaling;

 public:
  // Parameters with options, or parameter groups (see OptimizerOf).
  using OptimizerOf<Options>::OptimizerOf;
  // step, exp_avg, exp_avg_sq and, with amsgrad, max_exp_avg_sq.
  std::vector<StateEntry> state_entries() const override;

 private:
  void add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const override;
  size_t state_size(size_t group) const override { return this->options_of(group).amsgrad ? 4 : 3; }
  at::Device step_device(size_t group, const at::Tensor& parameter) const override;
  void update_foreach(const Options& options, TensorLists& lists) const override;
  void update_fused(const Options& options, TensorLists& lists, const Scaling* scaling) const override;
};
extern template class AdamOf<AdamOptions>;
extern template class AdamOf<AdamWOptions>;

// torch.optim.Adam for plain and distributed parameters.
using Adam = AdamOf<AdamOptions>;
// torch.optim.AdamW: Adam with decoupled weight decay, 0.01 by default.
// Example:  optim::AdamW opt(model->parameters(), {.lr = 3e-4, .fused = true});
//           optim::AdamW opt({{matrices, {.weight_decay = 0.1}}, {vectors, {.weight_decay = 0}}});
using AdamW = AdamOf<AdamWOptions>;

// Options of RMSprop, with the names and defaults of torch.optim.RMSprop.
struct RMSpropOptions {
  LearningRate lr = 1e-2;               // a number or a tensor of one element
  double alpha = 0.99;                  // smoothing constant of the squared gradients
  double eps = 1e-8;                    // added to the denominator
  double weight_decay = 0;              // L2 penalty
  double momentum = 0;                  // momentum factor
  bool centered = false;                // divide by an estimate of the standard deviation instead of the second moment
  bool maximize = false;                // maximize the objective instead of minimizing it
  std::optional<bool> foreach = {};     // false: one parameter after the other; the results are bitwise equal
  static constexpr bool fused = false;  // LibTorch has no fused kernel

  // Name of the optimizer in messages and state dicts.
  static constexpr const char* kKind = "RMSprop";
  // Throws UsageError for values out of range.
  void check() const;
  // Calls f(name, value) for each option that is saved.
  template <class Self, class F>
  static void visit(Self& o, F f) {
    f("lr", o.lr);
    f("alpha", o.alpha);
    f("eps", o.eps);
    f("weight_decay", o.weight_decay);
    f("momentum", o.momentum);
    f("centered", o.centered);
    f("maximize", o.maximize);
  }
};

// RMSprop, bitwise equal to PyTorch's if the learning rate is a number.
//
//   g <- g + weight_decay p      v <- alpha v + (1 - alpha) g^2      centered: a <- alpha a + (1 - alpha) g
//   d <- sqrt(v) + eps           centered: d <- sqrt(v - a^2) + eps
//   p <- p - lr g / d            momentum: buf <- momentum buf + g / d, p <- p - lr buf
//
// Example:  optim::RMSprop opt(model->parameters(), {.lr = 1e-3, .momentum = 0.9});
class RMSprop final : public OptimizerOf<RMSpropOptions> {
 public:
  // Parameters with options, or parameter groups (see OptimizerOf).
  using OptimizerOf::OptimizerOf;
  // step, square_avg and, if the group uses them, grad_avg and momentum_buffer.
  std::vector<StateEntry> state_entries() const override;

 private:
  void add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const override;
  size_t state_size(size_t group) const override;
  bool has_fused_kernel() const override { return false; }
  void update_foreach(const Options& options, TensorLists& lists) const override;
  void update_fused(const Options& options, TensorLists& lists, const Scaling* scaling) const override;
};

// Options of Adagrad, with the names and defaults of torch.optim.Adagrad.
struct AdagradOptions {
  LearningRate lr = 1e-2;                // a number or a tensor of one element
  double lr_decay = 0;                   // the learning rate of step t is lr / (1 + (t - 1) lr_decay)
  double weight_decay = 0;               // L2 penalty
  double initial_accumulator_value = 0;  // of the sum of squared gradients
  double eps = 1e-10;                    // added to the denominator
  bool maximize = false;                 // maximize the objective instead of minimizing it
  std::optional<bool> foreach = {};      // false: one parameter after the other; the results are bitwise equal
  bool fused = false;                    // one fused kernel per list of parameters, on the CPU; rounds differently

  // Name of the optimizer in messages and state dicts.
  static constexpr const char* kKind = "Adagrad";
  // Throws UsageError for values out of range.
  void check() const;
  // Calls f(name, value) for each option that is saved.
  template <class Self, class F>
  static void visit(Self& o, F f) {
    f("lr", o.lr);
    f("lr_decay", o.lr_decay);
    f("weight_decay", o.weight_decay);
    f("initial_accumulator_value", o.initial_accumulator_value);
    f("eps", o.eps);
    f("maximize", o.maximize);
  }
};

// Adagrad, bitwise equal to PyTorch's.
//
//   g <- g + weight_decay p      sum <- sum + g^2      p <- p - lr / (1 + (t - 1) lr_decay)  g / (sqrt(sum) + eps)
//
// Example:  optim::Adagrad opt(model->parameters(), {.lr = 0.1});
class Adagrad final : public OptimizerOf<AdagradOptions> {
 public:
  // Parameters with options, or parameter groups (see OptimizerOf).
  using OptimizerOf::OptimizerOf;
  // step and sum.
  std::vector<StateEntry> state_entries() const override;

 private:
  void add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const override;
  size_t state_size(size_t) const override { return 2; }
  at::Device step_device(size_t group, const at::Tensor& parameter) const override;
  void update_foreach(const Options& options, TensorLists& lists) const override;
  void update_fused(const Options& options, TensorLists& lists, const Scaling* scaling) const override;
};

}  // namespace tessera::optim
