#include "tessera/optim/adam.h"

#include "tessera/base/error.h"
#include "tessera/optim/option_dict.h"

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
#include <ATen/ops/_foreach_sub.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

namespace tessera::optim {
namespace {

enum RowIndex : size_t { kStep, kExpAvg, kExpAvgSq, kMaxExpAvgSq };

// How it is computed (foreach, fused) is not part of what is saved; decoupled_weight_decay says which optimizer it is.
template <class Options, class Visitor>
void visit(Options& o, Visitor&& f) {
  f("lr", o.lr);
  f("betas", o.betas);
  f("eps", o.eps);
  f("weight_decay", o.weight_decay);
  f("amsgrad", o.amsgrad);
  f("maximize", o.maximize);
}

void check(const AdamOptions& o) {
  const char* kind = o.decoupled_weight_decay ? "AdamW" : "Adam";
  if (!o.lr.is_tensor()) detail::check_at_least_zero(kind, "lr", o.lr.number());
  for (const double beta : o.betas)
    TESSERA_CHECK(beta >= 0 && beta < 1, UsageError, kind, ": betas must be at least 0 and below 1; found ", o.betas[0],
                  " and ", o.betas[1]);
  detail::check_at_least_zero(kind, "eps", o.eps);
  detail::check_at_least_zero(kind, "weight_decay", o.weight_decay);
  detail::check_implementation(kind, o.foreach, o.fused);
}

// With a tensor: a number would be made one anew for each of them.
void count_a_step(const Tensors& steps) { at::_foreach_add_(steps, at::ones({}, steps[0].options())); }

}  // namespace

AdamOptions AdamWOptions::as_adam() const {
  return {.lr = lr,
          .betas = betas,
          .eps = eps,
          .weight_decay = weight_decay,
          .amsgrad = amsgrad,
          .maximize = maximize,
          .decoupled_weight_decay = true,
          .foreach = foreach,
          .fused = fused};
}

Adam::Adam(const std::vector<Group>& groups) {
  TESSERA_CHECK(!groups.empty(), UsageError, "Adam: no parameter groups were given");
  for (const auto& group : groups) add_param_group(group);
}

AdamW::AdamW(const std::vector<Group>& groups) {
  TESSERA_CHECK(!groups.empty(), UsageError, "AdamW: no parameter groups were given");
  for (const auto& group : groups) add_param_group(group);
}

void Adam::add_param_group(const Group& group) {
  check(group.options);
  add_group(group.params);
  options_.push_back(group.options);
}

void Adam::set_group_options(size_t group, const Options& options) {
  check(options);
  options_.at(group) = options;
}

StateDict Adam::options(size_t group) const {
  StateDict dict;
  visit(options_.at(group), detail::WriteOptions{dict});
  return dict;
}

void Adam::set_options(size_t group, const StateDict& dict) { visit(options_.at(group), detail::ReadOptions{dict}); }

std::vector<OptimizerAccess::Row> Adam::rows() const {
  return {{.name = "step", .like_parameter = false},
          {.name = "exp_avg"},
          {.name = "exp_avg_sq"},
          {.name = "max_exp_avg_sq", .required = false}};
}

// Fused kernels read it where the parameter is. The others make small numbers of it, which is the host's work.
at::Device Adam::step_device(size_t group, const at::Tensor& parameter) const {
  return options_[group].fused ? detail::piece_of(parameter).device() : at::Device(at::kCPU);
}

void Adam::complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const {
  if (rows.empty()) {
    rows.push_back(at::zeros({}, at::TensorOptions(at::kFloat).device(step_device(group, parameter))));
    rows.push_back(row_like(parameter, true));
    rows.push_back(row_like(parameter, true));
  }
  if (options_[group].amsgrad && rows.size() == kMaxExpAvgSq) rows.push_back(row_like(parameter, true));
}

void Adam::update(size_t group, Bundle& bundle, const Scaling* scaling) {
  const auto& o = options_[group];
  if (o.fused) return update_fused(o, bundle, scaling);
  if (detail::use_foreach(o.foreach, o.fused)) return update_list(o, bundle);
  for (size_t i = 0; i < bundle.parameters.size(); i++) {
    auto one = bundle.only(i);
    update_list(o, one);
  }
}

// PyTorch computes the corrections as Python floats from step.item(). The same doubles, without reading a value:
// tensors of one double for each parameter, which enter the kernels where the floats do. There they are rounded to the
// type the kernel computes in; here too, before: next to a parameter without dims a double would have its way.
void Adam::update_list(const Options& o, Bundle& bundle) {
  const auto &parameters = bundle.parameters, &steps = bundle.rows[kStep], &exp_avgs = bundle.rows[kExpAvg],
             &exp_avg_sqs = bundle.rows[kExpAvgSq];
  const at::Tensor lr = o.lr.tensor();
  const auto computed_in = at::toOpMathType(parameters[0].scalar_type());
  auto gradients = bundle.gradients;
  if (o.maximize) gradients = at::_foreach_neg(gradients);
  count_a_step(steps);
  if (o.weight_decay != 0) {
    if (o.decoupled_weight_decay)
      at::_foreach_mul_(parameters, (1 - lr * o.weight_decay).to(computed_in));
    else
      gradients = at::_foreach_add(gradients, parameters, o.weight_decay);
  }
  at::_foreach_lerp_(exp_avgs, gradients, 1 - o.betas[0]);
  at::_foreach_mul_(exp_avg_sqs, detail::number_for(exp_avg_sqs, o.betas[1]));
  at::_foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1 - o.betas[1]);

  const auto t = at::stack(steps).to(at::kCPU, at::kDouble);                             // (n)
  const auto correction1 = (1 - at::pow(o.betas[0], t)).to(lr.scalar_type());            // (n)
  const auto root_of_correction2 = (1 - at::pow(o.betas[1], t)).sqrt().to(computed_in);  // (n)
  const auto minus_step_sizes = -(lr.to(at::kCPU) / correction1);                        // (n)
  if (o.amsgrad) at::_foreach_maximum_(bundle.rows[kMaxExpAvgSq], exp_avg_sqs);
  auto denominators = at::_foreach_sqrt(o.amsgrad ? bundle.rows[kMaxExpAvgSq] : exp_avg_sqs);
  at::_foreach_div_(denominators, root_of_correction2.unbind());
  at::_foreach_add_(denominators, detail::number_for(denominators, o.eps));
  at::_foreach_addcdiv_(parameters, exp_avgs, denominators, minus_step_sizes);
}

void Adam::update_fused(const Options& o, Bundle& bundle, const Scaling* scaling) {
  const std::optional<at::Tensor> scale = scaling ? std::optional(scaling->scale) : std::nullopt;
  const std::optional<at::Tensor> found_inf = scaling ? std::optional(scaling->found_inf) : std::nullopt;
  const auto& steps = bundle.rows[kStep];
  count_a_step(steps);
  const auto call = [&](const auto& lr) {
    const auto run = [&](auto fused) {
      fused(bundle.parameters, bundle.gradients, bundle.rows[kExpAvg], bundle.rows[kExpAvgSq],
            o.amsgrad ? bundle.rows[kMaxExpAvgSq] : Tensors{}, steps, lr, o.betas[0], o.betas[1], o.weight_decay, o.eps,
            o.amsgrad, o.maximize, scale, found_inf);
    };
    if (o.decoupled_weight_decay)
      run([](const auto&... args) { at::_fused_adamw_(args...); });
    else
      run([](const auto&... args) { at::_fused_adam_(args...); });
  };
  if (o.lr.is_tensor())
    call(o.lr.tensor());
  else
    call(o.lr.number());
  if (scaling)
    at::_foreach_sub_(steps, Tensors(steps.size(), scaling->found_inf.view(c10::IntArrayRef())));  // a step not made
}

}  // namespace tessera::optim
