#include "tessera/data_parallel/detail/per_parameter_reducer.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/requires_grad_agreement.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>

namespace tessera::data_parallel {

std::shared_ptr<PerParameterReducer> PerParameterReducer::make(NamedTensors parameters, comm::Group group) {
  const std::shared_ptr<PerParameterReducer> reducer(new PerParameterReducer(std::move(parameters), std::move(group)));
  const std::weak_ptr<PerParameterReducer> weak = reducer;
  for (size_t i = 0; i < reducer->parameters_.size(); i++)
    reducer->handles_.push_back(
        register_hook_on_any_leaf(reducer->parameters_[i].value, [&](const at::Tensor& parameter) {
          return register_post_accumulate_grad_hook(parameter, [weak, i](const at::Tensor&) {
            if (const auto self = weak.lock()) self->reduce(i);
          });
        }));
  return reducer;
}

PerParameterReducer::~PerParameterReducer() {
  for (auto& handle : handles_) handle.remove();
}

void PerParameterReducer::reduce(size_t i) {
  if (i == 0)
    CompilingScope::add_guard([weak = weak_from_this()] {
      const auto self = weak.lock();
      return self && self->sync_;
    });
  if (!sync_) return;
  const at::NoGradGuard no_grad;
  const auto& [name, value] = parameters_[i];
  if (!value.requires_grad()) return;  // frozen after its forward: LibTorch adds no gradient
  const auto& gradient = local_gradient(value, name);
  for (const auto& hook : hooks_) {
    GradBucket bucket(i, i == 0, gradient, {gradient}, {value}, group_);
    const auto reduced = hook(bucket).take(group_);
    if (!reduced.is_same(gradient)) gradient.copy_(reduced);
  }
  if (!hooks_.empty() || group_->size() == 1) return;
  const auto mean = funcol::all_reduce(gradient.div(group_->size()), ReduceOp::Sum, group_);
  funcol::wait(mean, group_);
  gradient.copy_(mean);
}

}  // namespace tessera::data_parallel
