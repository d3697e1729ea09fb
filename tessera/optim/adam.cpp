#include "tessera/optim/adam.h"

#include "tessera/base/error.h"

#include <ATen/OpMathType.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
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

// With a tensor: a number would be made one anew for each of them.
void count_a_step(const Tensors& steps) { at::_foreach_add_(steps, at::ones({}, steps[0].options())); }

}  // namespace

void AdamOptions::check() const { check_adam(*this); }
void AdamWOptions::check() const { check_adam(*this); }

template <class Options>
std::vector<OptimizerAccess::Row> AdamOf<Options>::rows() const {
  return {{.name = "step", .like_parameter = false},
          {.name = "exp_avg"},
          {.name = "exp_avg_sq"},
          {.name = "max_exp_avg_sq", .required = false}};
}

// Fused kernels read it where the parameter is. The others make small numbers of it, which is the host's work.
template <class Options>
at::Device AdamOf<Options>::step_device(size_t group, const at::Tensor& parameter) const {
  return this->group_options(group).fused ? detail::local_or_self(parameter).device() : at::Device(at::kCPU);
}

template <class Options>
void AdamOf<Options>::complete_rows(size_t group, const at::Tensor& parameter, Tensors& rows) const {
  if (rows.empty()) {
    rows.push_back(at::zeros({}, at::TensorOptions(at::kFloat).device(step_device(group, parameter))));
    rows.push_back(this->row_like(parameter, true));
    rows.push_back(this->row_like(parameter, true));
  }
  if (this->group_options(group).amsgrad && rows.size() == kMaxExpAvgSq)
    rows.push_back(this->row_like(parameter, true));
}

// PyTorch computes the corrections as Python floats from step.item(). The same doubles, without reading a value:
// tensors of one double for each parameter, which enter the kernels where the floats do. There they are rounded to the
// type the kernel computes in; here too, before: next to a parameter without dims a double would have its way.
template <class Options>
void AdamOf<Options>::update_list(const Options& o, Bundle& bundle) const {
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

template <class Options>
void AdamOf<Options>::update_fused(const Options& o, Bundle& bundle, const Scaling* scaling) const {
  const at::AutoDispatchBelowADInplaceOrView below;  // versions are counted after: these kernels do not
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

template class AdamOf<AdamOptions>;
template class AdamOf<AdamWOptions>;

}  // namespace tessera::optim
