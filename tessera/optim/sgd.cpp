#include "tessera/optim/sgd.h"

#include "tessera/base/error.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>

namespace tessera::optim {

void SGDOptions::check() const {
  if (!lr.is_tensor()) detail::check_at_least_zero(kKind, "lr", lr.number());
  detail::check_at_least_zero(kKind, "momentum", momentum);
  detail::check_at_least_zero(kKind, "weight_decay", weight_decay);
  TESSERA_CHECK(!nesterov || (momentum > 0 && dampening == 0), UsageError,
                "SGD: nesterov needs a momentum above 0 and no dampening; found momentum ", momentum, " and dampening ",
                dampening);
  detail::check_implementation(kKind, foreach, fused);
}

// Zeros, though the first update overwrites them: a fused one may find that a gradient is not finite, and leave them.
void SGD::complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const {
  if (group_options(group).momentum != 0 && rows.empty()) rows.push_back(row_like(parameter, true));
}

void SGD::update_list(const Options& o, Bundle& bundle) const {
  auto gradients = bundle.gradients;
  if (o.maximize) gradients = at::_foreach_neg(gradients);
  if (o.weight_decay != 0) gradients = at::_foreach_add(gradients, bundle.parameters, o.weight_decay);
  if (o.momentum != 0) {
    const auto& buffers = bundle.rows[0];
    if (bundle.first) {
      at::_foreach_copy_(buffers, gradients);
    } else {
      at::_foreach_mul_(buffers, detail::number_for(buffers, o.momentum));
      at::_foreach_add_(buffers, gradients, 1 - o.dampening);
    }
    gradients = o.nesterov ? at::_foreach_add(gradients, buffers, o.momentum) : buffers;
  }
  // alpha is a number: a tensor would have to be read here. Two roundings instead of one.
  if (o.lr.is_tensor())
    at::_foreach_add_(bundle.parameters, at::_foreach_mul(gradients, -o.lr.tensor()));
  else
    at::_foreach_add_(bundle.parameters, gradients, -o.lr.number());
}

void SGD::update_fused(const Options& o, Bundle& bundle, const Scaling* scaling) const {
  const at::AutoDispatchBelowADInplaceOrView below;  // versions are counted after: these kernels do not
  const std::optional<at::Tensor> scale = scaling ? std::optional(scaling->scale) : std::nullopt;
  const std::optional<at::Tensor> found_inf = scaling ? std::optional(scaling->found_inf) : std::nullopt;
  const auto call = [&](const auto& lr) {
    at::_fused_sgd_(bundle.parameters, bundle.gradients, o.momentum != 0 ? bundle.rows[0] : Tensors{}, o.weight_decay,
                    o.momentum, lr, o.dampening, o.nesterov, o.maximize, bundle.first, scale, found_inf);
  };
  if (o.lr.is_tensor())
    call(o.lr.tensor());
  else
    call(o.lr.number());
}

}  // namespace tessera::optim
