#include "tessera/compile/detail/trace/trace_run.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>

namespace tessera::compiler {
namespace {

const void* grad_fn_of(const at::Tensor& t) { return t.defined() ? t.grad_fn().get() : nullptr; }

// Saves the gradients of all parameters that require or have one; a frozen one may have one. Placeholders become
// inputs.
std::vector<TraceRun::SavedGradient> save_gradients(std::vector<Lifted>& inputs, bool placeholders) {
  std::vector<TraceRun::SavedGradient> saved;
  for (size_t i = 0, n = inputs.size(); i < n; i++) {
    if (inputs[i].role != Role::Parameter) continue;
    TraceRun::SavedGradient each{inputs[i].tensor, inputs[i].tensor.grad(), {}, inputs[i].name};
    const bool frozen = !inputs[i].tensor.requires_grad();
    if (frozen && !each.gradient.defined()) continue;
    if (!frozen && !each.gradient.defined() && placeholders) {
      const at::NoGradGuard no_grad;
      each.placeholder = at::zeros_like(each.parameter);
      inputs.push_back({each.placeholder, Role::Gradient, each.name});
    }
    saved.push_back(std::move(each));
  }
  return saved;
}

std::vector<const void*> grad_fns_of(const std::vector<Lifted>& inputs) {
  std::vector<const void*> found;
  for (const auto& each : inputs) found.push_back(grad_fn_of(each.tensor));
  return found;
}

}  // namespace

TraceRun::TraceRun(std::vector<Lifted> inputs, bool gradient_placeholders, const std::vector<at::Generator>& generators)
    : gradients_(save_gradients(inputs, gradient_placeholders)),
      inputs_(std::move(inputs)),
      histories_(grad_fns_of(inputs_)),
      tracer_(inputs_, random_.runtime_scalars(), generators) {
  for (const auto& each : gradients_)
    if (each.placeholder.defined()) each.parameter.mutable_grad() = each.placeholder;
}

TraceRun::~TraceRun() {
  tracer_.restore_changed_inputs();
  tracer_.restore_memory();
  for (const auto& each : gradients_) each.parameter.mutable_grad() = each.gradient;
}

Tensors TraceRun::call(const std::function<Tensors()>& function) {
  try {
    auto returned = function();
    tracer_.function_returned();
    return returned;
  } catch (const c10::Error& error) {
    tracer_.allow_memory_access();
    if (const auto message = Tracer::memory_access_error(error.what_without_backtrace()))
      TESSERA_FAIL(UsageError, *message);
    throw;
  }
}

bool TraceRun::any_gradient_undefined() const {
  return std::any_of(gradients_.begin(), gradients_.end(), [](const auto& each) { return !each.gradient.defined(); });
}

void TraceRun::wait_for_gradients() const {
  for (const auto& each : gradients_)
    if (each.parameter.grad().defined()) tessera::detail::local_or_self(each.parameter.grad());
}

void TraceRun::check_inputs_have_no_new_history() const {
  for (size_t i = 0; i < inputs_.size(); i++) {
    if (grad_fn_of(inputs_[i].tensor) == histories_[i]) continue;
    inputs_[i].tensor.detach_();
    TESSERA_FAIL(UsageError, "compile: the step wrote to ", inputs_[i].role, " ", inputs_[i].name, ", of shape ",
                 inputs_[i].tensor.sizes(),
                 ", with autograd recording, so the next call would backpropagate through this one; write under "
                 "torch::NoGradGuard, or to a copy");
  }
}

void TraceRun::check_inputs_have_their_shapes() {
  if (const auto changed = tracer_.restore_changed_inputs())
    TESSERA_FAIL(UsageError, "compile: the step changed the sizes, strides or memory of ", *changed,
                 " in place (t_, resize_, set_data or the like), which a compiled step cannot do again; assign the "
                 "result to a new tensor");
}

}  // namespace tessera::compiler
