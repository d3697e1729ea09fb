#pragma once
#include "tessera/optim/detail/learning_rate.h"
#include "tessera/optim/detail/optimizer_of.h"

namespace tessera::optim {

// Options of SGD, with the names and defaults of torch.optim.SGD.
struct SGDOptions {
  LearningRate lr = 1e-3;            // a number or a tensor of one element
  double momentum = 0;               // momentum factor
  double dampening = 0;              // dampening of the momentum
  double weight_decay = 0;           // L2 penalty
  bool nesterov = false;             // Nesterov momentum; requires momentum > 0 and dampening = 0
  bool maximize = false;             // maximize the objective instead of minimizing it
  std::optional<bool> foreach = {};  // false: one parameter after the other; the results are bitwise equal
  bool fused = false;                // one fused kernel per list of parameters; rounds differently

  // Name of the optimizer in messages and state dicts.
  static constexpr const char* kKind = "SGD";
  // Throws UsageError for values out of range.
  void check() const;
  // Calls f(name, value) for each option that is saved.
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

// Stochastic gradient descent. Bitwise equal to PyTorch's if the learning rate is a number.
//
//   g <- g + weight_decay p      buf <- g in the first step, then momentum buf + (1 - dampening) g
//   p <- p - lr buf              Nesterov: p <- p - lr (g + momentum buf)        without momentum: p <- p - lr g
//
// Example:  optim::SGD opt(model->parameters(), {.lr = 0.1, .momentum = 0.9});
class SGD final : public OptimizerOf<SGDOptions> {
 public:
  // Parameters with options, or parameter groups (see OptimizerOf).
  using OptimizerOf::OptimizerOf;
  // momentum_buffer, if the group has momentum.
  std::vector<StateEntry> state_entries() const override { return {{"momentum_buffer"}}; }

 private:
  void add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const override;
  bool new_state_is_neutral(size_t group) const override;
  size_t state_size(size_t group) const override { return options_of(group).momentum != 0; }
  void update_foreach(const Options& options, TensorLists& lists) const override;
  void update_fused(const Options& options, TensorLists& lists, const Scaling* scaling) const override;
};

}  // namespace tessera::optim
