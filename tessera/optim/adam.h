#pragma once
#include "tessera/optim/detail/learning_rate.h"
#include "tessera/optim/detail/optimizer_of.h"

#include <array>

namespace tessera::optim {

namespace detail {

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

struct AdamOptions {
  LearningRate lr = 1e-3;
  std::array<double, 2> betas = {0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  bool amsgrad = false;
  bool maximize = false;
  bool decoupled_weight_decay = false;  // true: what AdamW does. Not saved: it says which optimizer this is.
  std::optional<bool> foreach = {};     // false: one parameter after the other. The same bits.
  bool fused = false;                   // one kernel for all; its rounding is its own

  static constexpr const char* kKind = "Adam";
  void check() const;
  template <class Self, class F>
  static void visit(Self& o, F f) {
    detail::visit_adam_options(o, f);
  }
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

  static constexpr bool decoupled_weight_decay = true;
  static constexpr const char* kKind = "AdamW";
  void check() const;
  template <class Self, class F>
  static void visit(Self& o, F f) {
    detail::visit_adam_options(o, f);
  }
};

// Adam with PyTorch's arithmetic to the bit.
//
//   t <- t + 1      m <- b1 m + (1 - b1) g      v <- b2 v + (1 - b2) g^2
//   p <- p - lr / (1 - b1^t)  m / (sqrt(v) / sqrt(1 - b2^t) + eps)
//
// with g + weight_decay p for g, or, decoupled, p first multiplied by 1 - lr weight_decay. amsgrad: the largest v so
// far in place of v. t is a float tensor for each parameter, the corrections are computed from it as tensors.
// Example:  optim::Adam opt(model->parameters(), {.lr = 1e-3});
template <class Options>
class AdamOf final : public OptimizerOf<Options> {
  using Row = OptimizerAccess::Row;
  using Bundle = Optimizer::Bundle;
  using Scaling = Optimizer::Scaling;

 public:
  using OptimizerOf<Options>::OptimizerOf;
  std::vector<Row> rows() const override;

 private:
  void complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const override;
  size_t rows_used(size_t group) const override { return this->group_options(group).amsgrad ? 4 : 3; }
  at::Device step_device(size_t group, const at::Tensor& parameter) const override;
  void update_list(const Options& options, Bundle& bundle) const override;
  void update_fused(const Options& options, Bundle& bundle, const Scaling* scaling) const override;
};
extern template class AdamOf<AdamOptions>;
extern template class AdamOf<AdamWOptions>;

using Adam = AdamOf<AdamOptions>;
// Weight decay decoupled from the gradient, and 0.01 unless told.
// Example:  optim::AdamW opt(model->parameters(), {.lr = 3e-4, .fused = true});
//           optim::AdamW opt({{matrices, {.weight_decay = 0.1}}, {vectors, {.weight_decay = 0}}});
using AdamW = AdamOf<AdamWOptions>;

}  // namespace tessera::optim
