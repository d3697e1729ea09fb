#include "tessera/optim/adam.h"
#include "tessera/optim/detail/fused_step.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

namespace tessera::optim {
namespace {

enum AdagradState : size_t { kAdagradStep, kSum };

}  // namespace

void AdagradOptions::check() const {
  if (!lr.is_tensor()) detail::check_at_least_zero(kKind, "lr", lr.number());
  detail::check_at_least_zero(kKind, "lr_decay", lr_decay);
  detail::check_at_least_zero(kKind, "weight_decay", weight_decay);
  detail::check_at_least_zero(kKind, "initial_accumulator_value", initial_accumulator_value);
  detail::check_at_least_zero(kKind, "eps", eps);
  detail::check_implementation(kKind, foreach, fused);
}

std::vector<OptimizerAccess::StateEntry> Adagrad::state_entries() const {
  return {{.name = "step", .like_parameter = false}, {.name = "sum"}};
}

at::Device Adagrad::step_device(size_t group, const at::Tensor& parameter) const {
  return options_of(group).fused ? detail::local_or_self(parameter).device() : at::Device(at::kCPU);
}

void Adagrad::add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const {
  if (!state.empty()) return;
  state.push_back(at::zeros({}, at::TensorOptions(at::kFloat).device(step_device(group, parameter))));
  state.push_back(state_like(parameter, true));
  const auto initial = options_of(group).initial_accumulator_value;
  if (initial != 0) detail::local_or_self(state[kSum]).fill_(initial);
}

void Adagrad::update_foreach(const Options& o, TensorLists& lists) const {
  const auto &parameters = lists.parameters, &steps = lists.state[kAdagradStep], &sums = lists.state[kSum];
  auto gradients = lists.gradients;
  detail::increment_steps(steps);
  if (o.maximize) gradients = at::_foreach_neg(gradients);
  if (o.weight_decay != 0) gradients = at::_foreach_add(gradients, parameters, o.weight_decay);
  at::_foreach_addcmul_(sums, gradients, gradients);
  const auto denominators = at::_foreach_sqrt(sums);
  at::_foreach_add_(denominators, detail::op_math_scalar(denominators, o.eps));
  if (o.lr_decay == 0 && !o.lr.is_tensor()) {
    at::_foreach_addcdiv_(parameters, gradients, denominators, -o.lr.number());
    return;
  }
  // The same doubles as PyTorch's Python floats, without a copy to the host.
  const auto t = at::stack(steps).to(at::kCPU, at::kDouble);
  const auto minus_lrs = -(o.lr.tensor().to(at::kCPU, at::kDouble) / (1 + (t - 1) * o.lr_decay));
  at::_foreach_addcdiv_(parameters, gradients, denominators, minus_lrs);
}

void Adagrad::update_fused(const Options& o, TensorLists& lists, const Scaling* scaling) const {
  const auto& steps = lists.state[kAdagradStep];
  detail::run_fused(o.lr, steps, scaling, [&](const auto& lr, const auto& scale, const auto& found_inf) {
    at::_fused_adagrad_(lists.parameters, lists.gradients, lists.state[kSum], steps, lr, o.lr_decay, o.weight_decay,
                        o.eps, o.maximize, scale, found_inf);
  });
}

}  // namespace tessera::optim
