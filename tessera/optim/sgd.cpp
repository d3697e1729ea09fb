#include "tessera/optim/sgd.h"

#include "tessera/base/error.h"
#include "tessera/optim/option_dict.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_neg.h>
#include <ATen/ops/_fused_sgd.h>

namespace tessera::optim {
namespace {

// How it is computed (foreach, fused) is not part of what is saved.
template <class Options, class Visitor>
void visit(Options& o, Visitor&& f) {
  f("lr", o.lr);
  f("momentum", o.momentum);
  f("dampening", o.dampening);
  f("weight_decay", o.weight_decay);
  f("nesterov", o.nesterov);
  f("maximize", o.maximize);
}

void check(const SGDOptions& o) {
  if (!o.lr.is_tensor()) detail::check_at_least_zero("SGD", "lr", o.lr.number());
  detail::check_at_least_zero("SGD", "momentum", o.momentum);
  detail::check_at_least_zero("SGD", "weight_decay", o.weight_decay);
  TESSERA_CHECK(!o.nesterov || (o.momentum > 0 && o.dampening == 0), UsageError,
                "SGD: nesterov needs a momentum above 0 and no dampening; found momentum ", o.momentum,
                " and dampening ", o.dampening);
  detail::check_implementation("SGD", o.foreach, o.fused);
}

}  // namespace

SGD::SGD(const std::vector<Group>& groups) {
  TESSERA_CHECK(!groups.empty(), UsageError, "SGD: no parameter groups were given");
  for (const auto& group : groups) add_param_group(group);
}

void SGD::add_param_group(const Group& group) {
  check(group.options);
  add_group(group.params);
  options_.push_back(group.options);
}

void SGD::set_group_options(size_t group, const Options& options) {
  check(options);
  options_.at(group) = options;
}

StateDict SGD::options(size_t group) const {
  StateDict dict;
  visit(options_.at(group), detail::WriteOptions{dict});
  return dict;
}

void SGD::set_options(size_t group, const StateDict& dict) { visit(options_.at(group), detail::ReadOptions{dict}); }

// Zeros, though the first update overwrites them: a fused one may find that a gradient is not finite, and leave them.
void SGD::complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const {
  if (options_[group].momentum != 0 && rows.empty()) rows.push_back(row_like(parameter, true));
}

void SGD::update(size_t group, Bundle& bundle, const Scaling* scaling) {
  const auto& o = options_[group];
  if (o.fused) return update_fused(o, bundle, scaling);
  if (detail::use_foreach(o.foreach, o.fused)) return update_list(o, bundle);
  for (size_t i = 0; i < bundle.parameters.size(); i++) {
    auto one = bundle.only(i);
    update_list(o, one);
  }
}

void SGD::update_list(const Options& o, Bundle& bundle) {
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

void SGD::update_fused(const Options& o, Bundle& bundle, const Scaling* scaling) {
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
