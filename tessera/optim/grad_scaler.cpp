#include "tessera/optim/grad_scaler.h"

#include "tessera/base/error.h"
#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/tracing/op_mode.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <typeinfo>
#include <utility>

namespace tessera::optim {
namespace {

// The maximum of found_inf over all ranks of the tensors' meshes: one all-reduce per mesh.
at::Tensor max_over_meshes(at::Tensor found_inf, const Tensors& tensors) {
  std::vector<DeviceMesh> meshes;
  for (const auto& t : tensors)
    if (is_dtensor(t) && std::find(meshes.begin(), meshes.end(), DTensor(t).device_mesh()) == meshes.end())
      meshes.push_back(DTensor(t).device_mesh());
  for (const auto& mesh : meshes) {
    const auto axes = static_cast<size_t>(mesh.ndim());
    const auto partial = DTensor::from_local(found_inf, mesh, Placements(axes, Partial(ReduceOp::Max)));
    found_inf = detail::local_or_self(partial.redistribute(Placements(axes, Replicate())));
  }
  return found_inf;
}

// "AdamW", or "torch::optim::AdamW".
std::string name_of(const torch::optim::Optimizer& optimizer) {
  const auto* own = dynamic_cast<const Optimizer*>(&optimizer);
  return own ? own->kind() : c10::demangle(typeid(optimizer).name());
}

Tensors parameters_of(const torch::optim::Optimizer& optimizer) {
  Tensors all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(options) {
  TESSERA_CHECK(options.init_scale > 0 && options.growth_factor > 1 && options.backoff_factor > 0 &&
                    options.backoff_factor < 1 && options.growth_interval > 0,
                UsageError,
                "GradScaler: init_scale and growth_interval must be greater than 0, growth_factor greater than 1, ",
                "backoff_factor between 0 and 1; found ", options.init_scale, ", ", options.growth_interval, ", ",
                options.growth_factor, ", ", options.backoff_factor);
  scale_ = at::full({1}, options.init_scale, at::kFloat);
  growth_tracker_ = at::zeros({1}, at::kInt);
}

void GradScaler::move_to(at::Device device) {
  if (scale_.device() == device) return;
  const OpModesOff once;  // not recorded: a compiled step must not repeat this in each run
  scale_ = scale_.to(device);
  growth_tracker_ = growth_tracker_.to(device);
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  if (!is_dtensor(loss)) move_to(loss.device());
  return loss * scale_.view(c10::IntArrayRef()).clone();  // update() writes to it, and backward needs what it was
}

GradScaler::OptimizerState& GradScaler::state_of(const torch::optim::Optimizer& optimizer) {
  for (auto& one : per_optimizer_states_)
    if (one.optimizer == &optimizer) return one;
  if (compiling() && per_optimizer_states_.empty())  // this state exists only while tracing, not in replays
    CompilingScope::on_trace_end([this](bool finished) {
      const bool open = !std::exchange(per_optimizer_states_, {}).empty();
      TESSERA_CHECK(
          !open || !finished, UsageError,
          "GradScaler: a compiled step has unscale_ or step in it and no update(); compile all three, or none");
    });
  return per_optimizer_states_.emplace_back(OptimizerState{&optimizer, {}});
}

void GradScaler::check_gradients(torch::optim::Optimizer& optimizer, OptimizerState& state, bool unscale) {
  const at::NoGradGuard no_grad;
  const auto gradients = detail::reduce_partial_gradients(parameters_of(optimizer));
  TESSERA_CHECK(!gradients.empty(), UsageError, "GradScaler: no parameter of this ", name_of(optimizer),
                " has a gradient; call backward() first");
  for (const auto& gradient : gradients)
    TESSERA_CHECK(!unscale || gradient.scalar_type() != at::kHalf, UsageError, "GradScaler: a gradient of sizes ",
                  gradient.sizes(),
                  " has dtype fp16 and would underflow when it is divided by the scale; keep parameters in fp32");
  const auto locals = detail::local_tensors_of(gradients);
  move_to(locals[0].device());
  const auto inverse = unscale ? scale_.to(at::kDouble).reciprocal().to(at::kFloat) : at::ones_like(scale_);
  auto found_inf = at::zeros({1}, scale_.options());
  for (const auto& list : detail::lists_by_device_and_dtype(locals)) {
    auto found_here = found_inf.to(list[0].device());
    at::_amp_foreach_non_finite_check_and_unscale_(list, found_here, inverse.to(list[0].device()));
    found_inf = at::maximum(found_inf, found_here.to(found_inf.device()));
  }
  if (unscale)
    for (const auto& gradient : gradients) detail::mark_written(gradient, true);
  state.found_inf = max_over_meshes(found_inf, gradients);
  state.unscaled = unscale;
}

void GradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  auto& state = state_of(optimizer);
  TESSERA_CHECK(!state.unscaled && !state.stepped, UsageError, "GradScaler: the gradients of this ", name_of(optimizer),
                " were already unscaled since the last update()");
  check_gradients(optimizer, state, true);
}

void GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return;
  }
  auto& state = state_of(optimizer);
  TESSERA_CHECK(!state.stepped, UsageError, "GradScaler: this ", name_of(optimizer),
                " has already stepped since the last update()");
  auto* own = dynamic_cast<Optimizer*>(&optimizer);
  bool fused = own, supports_scaling = own;
  for (size_t g = 0; own && g < own->group_count(); g++) {
    fused = fused && own->is_fused(g);
    supports_scaling = supports_scaling && own->supports_scaling(g);
  }
  if (!state.unscaled) check_gradients(optimizer, state, !fused);
  if (supports_scaling)
    own->step({state.unscaled ? at::ones_like(scale_) : scale_, state.found_inf});
  else if (state.found_inf.item<float>() == 0)
    optimizer.step();
  state.stepped = true;
}

void GradScaler::update() {
  if (!options_.enabled) return;
  const at::NoGradGuard no_grad;
  at::Tensor found_inf;
  for (const auto& one : per_optimizer_states_)
    if (one.found_inf.defined())
      found_inf = found_inf.defined() ? at::maximum(found_inf, one.found_inf) : one.found_inf;
  TESSERA_CHECK(found_inf.defined(), UsageError,
                "GradScaler: update() was called, but no optimizer has stepped since the last update()");
  at::_amp_update_scale_(scale_, growth_tracker_, found_inf, options_.growth_factor, options_.backoff_factor,
                         options_.growth_interval);
  per_optimizer_states_.clear();
}

double GradScaler::get_scale() const { return options_.enabled ? scale_.item<double>() : 1; }

at::Tensor GradScaler::found_inf(const torch::optim::Optimizer& optimizer) const {
  for (const auto& one : per_optimizer_states_)
    if (one.optimizer == &optimizer && one.found_inf.defined()) return one.found_inf;
  TESSERA_FAIL(UsageError, "GradScaler: the gradients of this ", name_of(optimizer),
               " were not checked since the last update(); call unscale_ or step first");
}

StateDict GradScaler::state_dict() const {
  return {{"scale", scale_.clone()}, {"growth_tracker", growth_tracker_.clone()}};
}

void GradScaler::load_state_dict(const StateDict& dict) {
  const auto scale = dict.at("scale"), tracker = dict.at("growth_tracker");
  TESSERA_CHECK(scale.numel() == 1 && tracker.numel() == 1, UsageError,
                "GradScaler: scale and growth_tracker must have one element each; found ", scale.sizes(), " and ",
                tracker.sizes());
  scale_.copy_(scale.view({1}));
  growth_tracker_.copy_(tracker.view({1}));
}

}  // namespace tessera::optim
