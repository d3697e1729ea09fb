#include "tessera/optim/sgd.h"

#include "tessera/base/error.h"
#include "tessera/optim/detail/fused_step.h"
#include "tessera/tracing/detail/runtime_scalar.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/fill.h>

namespace tessera::optim {

void SGDOptions::check() const {
  if (!lr.is_tensor()) detail::check_at_least_zero(kKind, "lr", lr.number());
  detail::check_at_least_zero(kKind, "momentum", momentum);
  detail::check_at_least_zero(kKind, "weight_decay", weight_decay);
  TESSERA_CHECK(!nesterov || (momentum > 0 && dampening == 0), UsageError,
                "SGD: nesterov needs momentum > 0 and dampening = 0; found momentum ", momentum, " and dampening ",
                dampening);
  detail::check_implementation(kKind, foreach, fused);
}

// Zeros, although the first update overwrites them: a fused update may be skipped because of an inf gradient. Negative
// ones, because -0.0 * momentum + gradient has the bits of the gradient, also where that is -0.0.
void SGD::add_missing_state(size_t group, const at::Tensor& parameter, Tensors& state) const {
  if (options_of(group).momentum == 0 || !state.empty()) return;
  state.push_back(state_like(parameter, true));
  detail::local_or_self(state[0]).fill_(-0.0);
}
bool SGD::new_state_is_neutral(size_t group) const { return options_of(group).dampening == 0; }

namespace {

// What depends on whether a run of a compiled step is the first step. New state is -0.0, so a first step without
// dampening gives the gradient itself, as PyTorch's first step does.
double at_first_run(const char* name, double first, double later, const std::function<bool()>& is_first_run) {
  if (!is_first_run) return later;
  return runtime_scalar(name, [first, later, is_first_run] { return is_first_run() ? first : later; });
}

}  // namespace

void SGD::update_foreach(const Options& o, TensorLists& lists) const {
  auto gradients = lists.gradients;
  if (o.maximize) gradients = at::_foreach_neg(gradients);
  if (o.weight_decay != 0) gradients = at::_foreach_add(gradients, lists.parameters, o.weight_decay);
  if (o.momentum != 0) {
    const auto& buffers = lists.state[0];
    if (lists.first_step && !lists.is_first_run) {
      at::_foreach_copy_(buffers, gradients);
    } else {
      at::_foreach_mul_(buffers, detail::op_math_scalar(buffers, o.momentum));
      at::_foreach_add_(buffers, gradients, at_first_run("gradient_weight", 1, 1 - o.dampening, lists.is_first_run));
    }
    gradients = o.nesterov ? at::_foreach_add(gradients, buffers, o.momentum) : buffers;
  }
  // `alpha` must be a number, and reading a tensor would copy to the host. So multiply first: two roundings, not one.
  if (o.lr.is_tensor())
    at::_foreach_add_(lists.parameters, at::_foreach_mul(gradients, -o.lr.tensor()));
  else
    at::_foreach_add_(lists.parameters, gradients, -o.lr.number());
}

void SGD::update_fused(const Options& o, TensorLists& lists, const Scaling* scaling) const {
  detail::run_fused(o.lr, /*steps=*/{}, scaling, [&](const auto& lr, const auto& scale, const auto& found_inf) {
    at::_fused_sgd_(lists.parameters, lists.gradients, o.momentum != 0 ? lists.state[0] : Tensors{}, o.weight_decay,
                    o.momentum, lr, at_first_run("dampening", 0, o.dampening, lists.is_first_run), o.nesterov,
                    o.maximize, lists.first_step && !lists.is_first_run, scale, found_inf);
  });
}

}  // namespace tessera::optim
