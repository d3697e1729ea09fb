#include "tessera/base/error.h"
#include "tessera/optim/adam.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_addcdiv.h>
#include <ATen/ops/_foreach_addcmul.h>
#include <ATen/ops/_foreach_lerp.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_foreach_sqrt.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

namespace tessera::optim {
namespace {

enum RMSpropState : size_t { kRMSpropStep, kSquareAvg, kGradAvg, kMomentumBuffer };

}  // namespace

void RMSpropOptions::check() const {
  if (!lr.is_tensor()) detail::check_at_least_zero(kKind, "lr", lr.number());
  detail::check_at_least_zero(kKind, "alpha", alpha);
  detail::check_at_least_zero(kKind, "eps", eps);
  detail::check_at_least_zero(kKind, "weight_decay", weight_decay);
  detail::check_at_least_zero(kKind, "momentum", momentum);
}

std::vector<OptimizerAccess::StateEntry> RMSprop::state_entries() const {
  return {{.name = "step", .like_parameter = false},
          {.name = "square_avg"},
          {.name = "grad_avg", .required = false},
          {.name = "momentum_buffer", .required = false}};
}

size_t RMSprop::state_size(size_t group) const {
  const auto& o = options_of(group);
  return o.momentum != 0 ? 4 : o.centered ? 3 : 2;
}

void RMSprop::add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const {
  const auto& o = options_of(group);
  if (state.empty()) state.push_back(at::zeros({}, at::kFloat));
  if (state.size() == kSquareAvg) state.push_back(state_like(parameter, true));
  if (state.size() == kGradAvg) state.push_back(o.centered ? state_like(parameter, true) : at::Tensor());
  if (state.size() == kMomentumBuffer && o.momentum != 0) state.push_back(state_like(parameter, true));
}

void RMSprop::update_foreach(const Options& o, TensorLists& lists) const {
  const auto &parameters = lists.parameters, &square_avgs = lists.state[kSquareAvg];
  auto gradients = lists.gradients;
  at::_foreach_add_(lists.state[kRMSpropStep], at::ones({}, at::kFloat));
  if (o.maximize) gradients = at::_foreach_neg(gradients);
  if (o.weight_decay != 0) gradients = at::_foreach_add(gradients, parameters, o.weight_decay);
  at::_foreach_mul_(square_avgs, detail::op_math_scalar(square_avgs, o.alpha));
  at::_foreach_addcmul_(square_avgs, gradients, gradients, 1 - o.alpha);
  Tensors denominators;
  if (o.centered) {
    const auto& grad_avgs = lists.state[kGradAvg];
    at::_foreach_lerp_(grad_avgs, gradients, 1 - o.alpha);
    denominators = at::_foreach_addcmul(square_avgs, grad_avgs, grad_avgs, -1);
    at::_foreach_sqrt_(denominators);
  } else {
    denominators = at::_foreach_sqrt(square_avgs);
  }
  at::_foreach_add_(denominators, detail::op_math_scalar(denominators, o.eps));
  if (o.momentum != 0) {
    const auto& buffers = lists.state[kMomentumBuffer];
    at::_foreach_mul_(buffers, detail::op_math_scalar(buffers, o.momentum));
    at::_foreach_addcdiv_(buffers, gradients, denominators);
    // `alpha` must be a number, as in SGD
    if (o.lr.is_tensor())
      at::_foreach_add_(parameters, at::_foreach_mul(buffers, -o.lr.tensor()));
    else
      at::_foreach_add_(parameters, buffers, -o.lr.number());
  } else if (o.lr.is_tensor()) {
    at::_foreach_addcdiv_(parameters, at::_foreach_mul(gradients, -o.lr.tensor()), denominators);
  } else {
    at::_foreach_addcdiv_(parameters, gradients, denominators, -o.lr.number());
  }
}

void RMSprop::update_fused(const Options&, TensorLists&, const Scaling*) const {
  TESSERA_FAIL(InternalError, "RMSprop has no fused kernel");
}

}  // namespace tessera::optim
