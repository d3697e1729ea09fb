#include "tessera/optim/adam.h"

#include "tessera/base/error.h"
#include "tessera/optim/detail/fused_step.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_div.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_maximum.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

namespace tessera::optim {
namespace {

enum AdamState : size_t { kStep, kExpAvg, kExpAvgSq, kMaxExpAvgSq };

template <class Options>
void check_adam(const Options& o) {
  if (!o.lr.is_tensor()) detail::check_at_least_zero(o.kKind, "lr", o.lr.number());
  for (const double beta : o.betas)
    TESSERA_CHECK(beta >= 0 && beta < 1, UsageError, o.kKind, ": betas must be at least 0 and below 1; found ",
                  o.betas[0], " and ", o.betas[1]);
  detail::check_at_least_zero(o.kKind, "eps", o.eps);
  detail::check_at_least_zero(o.kKind, "weight_decay", o.weight_decay);
  detail::check_implementation(o.kKind, o.foreach, o.fused);
}

}  // namespace

void AdamOptions::check() const { check_adam(*this); }
void AdamWOptions::check() const { check_adam(*this); }

template <class Options>
std::vector<OptimizerAccess::StateEntry> AdamOf<Options>::state_entries() const {
  return {{.name = "step", .like_parameter = false},
          {.name = "exp_avg"},
          {.name = "exp_avg_sq"},
          {.name = "max_exp_avg_sq", .required = false}};
}

// Fused kernels read `step` on the parameter's device. The others compute a few scalars from it, on the host.
template <class Options>
at::Device AdamOf<Options>::step_device(size_t group, const at::Tensor& parameter) const {
  return this->options_of(group).fused ? detail::local_or_self(parameter).device() : at::Device(at::kCPU);
}

template <class Options>
void AdamOf<Options>::add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const {
  if (state.empty()) {
    state.push_back(at::zeros({}, at::TensorOptions(at::kFloat).device(step_device(group, parameter))));
    state.push_back(this->state_like(parameter, true));
    state.push_back(this->state_like(parameter, true));
  }
  if (this->options_of(group).amsgrad && state.size() == kMaxExpAvgSq)
    state.push_back(this->state_like(parameter, true));
}

// PyTorch computes the bias corrections as Python floats from step.item(). This code computes the same doubles as
// tensors, one per parameter, without a copy to the host. Kernels round such floats to their compute dtype (opmath).
// The tensors are rounded to it here, because a double tensor would promote a parameter without dims.
template <class Options>
void AdamOf<Options>::update_foreach(const Options& o, TensorLists& lists) const {
  const auto &parameters = lists.parameters, &steps = lists.state[kStep], &exp_avgs = lists.state[kExpAvg],
             &exp_avg_sqs = lists.state[kExpAvgSq];
  const at::Tensor lr = o.lr.tensor();
  const auto op_math_type = at::toOpMathType(parameters[0].scalar_type());
  auto gradients = lists.gradients;
  if (o.maximize) gradients = at::_foreach_neg(gradients);
  detail::increment_steps(steps);
  if (o.weight_decay != 0) {
    if (o.decoupled_weight_decay)
      at::_foreach_mul_(parameters, (1 - lr * o.weight_decay).to(op_math_type));
    else
      gradients = at::_foreach_add(gradients, parameters, o.weight_decay);
  }
  at::_foreach_lerp_(exp_avgs, gradients, 1 - o.betas[0]);
  at::_foreach_mul_(exp_avg_sqs, detail::op_math_scalar(exp_avg_sqs, o.betas[1]));
  at::_foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - o.betas[1]);

  const auto t = at::stack(steps).to(at::kCPU, at::kDouble);                              // (n)
  const auto correction1 = (1 - at::pow(o.betas[0], t)).to(lr.scalar_type());             // (n)
  const auto root_of_correction2 = (1 - at::pow(o.betas[1], t)).sqrt().to(op_math_type);  // (n)
  const auto minus_step_sizes = -(lr.to(at::kCPU) / correction1);                         // (n)
  if (o.amsgrad) at::_foreach_maximum_(lists.state[kMaxExpAvgSq], exp_avg_sqs);
  auto denominators = at::_foreach_sqrt(o.amsgrad ? lists.state[kMaxExpAvgSq] : exp_avg_sqs);
  at::_foreach_div_(denominators, root_of_correction2.unbind());
  at::_foreach_add_(denominators, detail::op_math_scalar(denominators, o.eps));
  at::_foreach_addcdiv_(parameters, exp_avgs, denominators, minus_step_sizes);
}

template <class Options>
void AdamOf<Options>::update_fused(const Options& o, TensorLists& lists, const Scaling* scaling) const {
  const auto& steps = lists.state[kStep];
  detail::run_fused(o.lr, steps, scaling, [&](const auto& lr, const auto& scale, const auto& found_inf) {
    const auto run = [&](auto fused) {
      fused(lists.parameters, lists.gradients, lists.state[kExpAvg], lists.state[kExpAvgSq],
            o.amsgrad ? lists.state[kMaxExpAvgSq] : Tensors{}, steps, lr, o.betas[0], o.betas[1], o.weight_decay, o.eps,
            o.amsgrad, o.maximize, scale, found_inf);
    };
    if (o.decoupled_weight_decay)
      run([](const auto&... args) { at::_fused_adamw_(args...); });
    else
      run([](const auto&... args) { at::_fused_adam_(args...); });
  });
}

template class AdamOf<AdamOptions>;
template class AdamOf<AdamWOptions>;

}  // namespace tessera::optim
