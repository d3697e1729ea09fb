#pragma once
#include "tessera/optim/detail/learning_rate.h"
#include "tessera/optim/detail/optimizer_of.h"

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

  static constexpr const char* kKind = "SGD";
  void check() const;
  template <class Self, class F>
  static void visit(Self& o, F f) {
    f("lr", o.lr);
    f("momentum", o.momentum);
    f("dampening", o.dampening);
    f("weight_decay", o.weight_decay);
    f("nesterov", o.nesterov);
    f("maximize", o.maximize);
  }
};

// Stochastic gradient descent with PyTorch's arithmetic, to the bit for a learning rate that is a number.
//
//   g <- g + weight_decay p      buf <- g the first time, then momentum buf + (1 - dampening) g
//   p <- p - lr buf              Nesterov: p <- p - lr (g + momentum buf)        no momentum: p <- p - lr g
//
// Example:  optim::SGD opt(model->parameters(), {.lr = 0.1, .momentum = 0.9});
class SGD final : public OptimizerOf<SGDOptions> {
 public:
  using OptimizerOf::OptimizerOf;
  std::vector<Row> rows() const override { return {{"momentum_buffer"}}; }

 private:
  void complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const override;
  size_t rows_used(size_t group) const override { return group_options(group).momentum != 0; }
  void update_list(const Options& options, Bundle& bundle) const override;
  void update_fused(const Options& options, Bundle& bundle, const Scaling* scaling) const override;
};

}  // namespace tessera::optim
