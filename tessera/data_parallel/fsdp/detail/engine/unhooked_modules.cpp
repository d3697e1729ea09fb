#include "tessera/data_parallel/fsdp/detail/engine/unhooked_modules.h"

#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/fsdp/detail/engine/trace_state.h"
#include "tessera/dtensor/detail/all_gather_on_use.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/register.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>

namespace tessera::data_parallel::fsdp {
namespace {

// Reduces the gradient of one parameter.
struct UnhookedGradient : std::enable_shared_from_this<UnhookedGradient> {
  UnhookedGradient(std::string name, SpecRef spec, std::shared_ptr<ScheduledGroup> scheduled)
      : name(std::move(name)), spec(std::move(spec)), scheduled(std::move(scheduled)) {}
  std::string name;
  SpecRef spec;
  std::shared_ptr<ScheduledGroup> scheduled;
  at::Tensor saved = {};      // .grad from before this backward: sharded and reduced
  at::Tensor unsharded = {};  // sum of gradients of backward passes without reduction
  size_t trace_serial = 0;    // see trace_state.h

  void before_accumulate(const at::Tensor& parameter) {
    if (compiling() && std::exchange(trace_serial, CompilingScope::serial()) != CompilingScope::serial()) {
      snapshot_in_traced_step(scheduled);
      snapshot_in_traced_step(shared_from_this(), unsharded);
    }
    if (is_dtensor(parameter.grad())) saved = std::exchange(parameter.mutable_grad(), {});
  }

  void gradient_ready(const at::Tensor& parameter) {
    const at::NoGradGuard no_grad;
    auto sum = local_gradient(parameter.grad(), {}, name);
    if (unsharded.defined()) sum = std::exchange(unsharded, {}).add_(sum);
    if (!scheduled->sync) unsharded = std::exchange(sum, {});
    auto& gradient = parameter.mutable_grad();
    gradient = sum.defined() ? reduced_mean(sum) : at::Tensor();
    if (!saved.defined()) return;
    const auto before = std::exchange(saved, {});
    gradient = gradient.defined() ? before.add_(gradient) : before;  // same memory in each step, for compiled steps
  }

  // This rank's shard of the mean over all ranks of the mesh. The reduce-scatter is first, so that the all-reduce over
  // replicas has only a shard.
  at::Tensor reduced_mean(const at::Tensor& gradient) const {
    const auto scaled = gradient.contiguous().div(static_cast<double>(spec->mesh.size()));
    Placements placements(spec->placements.size(), Partial());
    const auto with_current_placements = [&] {
      return intern(spec->mesh, placements, spec->sizes, spec->strides, gradient.scalar_type(), gradient.device());
    };
    auto sum = tessera::detail::wrap(scaled, with_current_placements());
    placements.back() = spec->placements.back();
    sum = tessera::detail::redistribute_no_grad(sum, with_current_placements());
    placements = spec->placements;
    return tessera::detail::redistribute_no_grad(sum, with_current_placements());
  }
};

}  // namespace

void shard_unhooked_params(const std::vector<FSDPParam>& params, const std::shared_ptr<ScheduledGroup>& scheduled) {
  tessera::detail::register_kernels();
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor, unsharded_spec, sharded_spec] : params) {
    auto parameter = tensor;
    distribute_in_place(parameter, sharded_spec->mesh, sharded_spec->placements, {.src_data_rank = std::nullopt});
    tessera::detail::mark_all_gather_on_use(parameter);
    if (!parameter.requires_grad()) continue;
    auto gradient = std::make_shared<UnhookedGradient>(name, sharded_spec, scheduled);
    // Weak: the parameter owns its hooks.
    const c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> weak(parameter.getIntrusivePtr());
    parameter.register_hook([gradient, weak](const at::Tensor&) {
      if (auto impl = weak.lock()) gradient->before_accumulate(at::Tensor(std::move(impl)));
    });
    register_post_accumulate_grad_hook(parameter,
                                       [gradient](const at::Tensor& leaf) { gradient->gradient_ready(leaf); });
  }
}

}  // namespace tessera::data_parallel::fsdp
