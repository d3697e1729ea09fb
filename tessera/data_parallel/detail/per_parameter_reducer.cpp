#include "tessera/data_parallel/detail/per_parameter_reducer.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>

namespace tessera::data_parallel {

PerParameterReducer::PerParameterReducer(NamedTensors parameters, comm::Group group)
    : parameters_(std::move(parameters)), group_(std::move(group)) {
  for (size_t i = 0; i < parameters_.size(); i++)
    handles_.push_back(
        register_post_accumulate_grad_hook(parameters_[i].value, [this, i](const at::Tensor&) { reduce(i); }));
}

PerParameterReducer::~PerParameterReducer() {
  for (auto& handle : handles_) handle.remove();
}

void PerParameterReducer::reduce(size_t i) {
  if (i == 0) CompilingScope::add_guard([this] { return sync_; });
  if (!sync_) return;
  const at::NoGradGuard no_grad;
  const auto& [name, value] = parameters_[i];
  const auto& gradient = local_gradient(value, name);
  for (const auto& hook : hooks_) {
    GradBucket bucket(i, i == 0, gradient, {gradient}, {value}, group_);
    const auto reduced = hook(bucket).take(group_);
    if (!reduced.is_same(gradient)) gradient.copy_(reduced);
  }
  if (!hooks_.empty()) return;
  const auto mean = funcol::all_reduce(gradient.div(group_->size()), ReduceOp::Sum, group_);
  funcol::wait(mean, group_);
  gradient.copy_(mean);
}

}  // namespace tessera::data_parallel
