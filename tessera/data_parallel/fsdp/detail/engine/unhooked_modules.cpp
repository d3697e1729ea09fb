#include "tessera/data_parallel/fsdp/detail/engine/unhooked_modules.h"

#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/data_parallel/detail/requires_grad_agreement.h"
#include "tessera/data_parallel/fsdp/detail/engine/trace_state.h"
#include "tessera/dtensor/detail/all_gather_on_use.h"
#include "tessera/dtensor/detail/autograd_functions.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/register.h"
#include "tessera/nn/grad_hooks.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/count_nonzero.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

namespace tessera::data_parallel::fsdp {
namespace {

struct UnhookedGradient;

// The parameters of one fully_shard() call. At the end of a backward with synchronization it reduces the gradients that
// earlier passes left, of parameters that this backward did not use.
struct UnhookedGroup : std::enable_shared_from_this<UnhookedGroup> {
  std::vector<std::weak_ptr<UnhookedGradient>> gradients;
  int graph_task = -1;  // id of the last backward
  void begin_backward();
};

// Reduces the gradient of one parameter. While a gradient is not reduced, it is .grad (unsharded).
struct UnhookedGradient : std::enable_shared_from_this<UnhookedGradient> {
  UnhookedGradient(std::string name, SpecRef spec, std::shared_ptr<ScheduledGroup> scheduled)
      : name(std::move(name)), spec(std::move(spec)), scheduled(std::move(scheduled)) {}
  std::string name;
  SpecRef spec;
  std::shared_ptr<ScheduledGroup> scheduled;
  std::shared_ptr<UnhookedGroup> group = {};
  // Weak: the parameter owns its hooks.
  c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> parameter{
      c10::intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>()};
  at::Tensor saved = {};      // .grad from before this backward: sharded and reduced
  at::Tensor unsharded = {};  // compiled steps: sum of gradients of backward passes without reduction
  at::Tensor shown = {};      // the same as .grad, after an eager backward without reduction
  int64_t shown_version = 0;
  bool waits = false;       // a backward without reduction has reached the parameter; equal on all ranks
  size_t trace_serial = 0;  // see trace_state.h

  void before_accumulate(const at::Tensor& parameter) {
    if (!compiling()) group->begin_backward();
    if (compiling() && std::exchange(trace_serial, CompilingScope::serial()) != CompilingScope::serial()) {
      snapshot_in_traced_step(scheduled);
      snapshot_in_traced_step(shared_from_this(), unsharded);
    }
    take_shown(parameter);
    if (is_dtensor(parameter.grad())) saved = std::exchange(parameter.mutable_grad(), {});
  }

  // zero_grad() has discarded what is not reduced; with zero_grad(false) it has become zero.
  void take_shown(const at::Tensor& parameter) {
    const auto before = std::exchange(shown, {});
    if (!before.defined()) return;
    if (!parameter.grad().is_same(before)) {
      saved.reset();
    } else if (saved.defined() && before._version() != shown_version && before.count_nonzero().item<int64_t>() == 0) {
      saved.zero_();
    }
  }

  void gradient_ready(const at::Tensor& parameter) {
    const at::NoGradGuard no_grad;
    if (!parameter.requires_grad()) {  // frozen after its forward: LibTorch adds no gradient
      if (saved.defined()) parameter.mutable_grad() = std::exchange(saved, {});
      return;
    }
    auto sum = local_gradient(parameter.grad(), {}, name);
    if (unsharded.defined()) sum = std::exchange(unsharded, {}).add_(sum);
    waits = !scheduled->sync;
    if (!scheduled->sync && !compiling()) {
      shown = parameter.mutable_grad() = std::move(sum);
      shown_version = shown._version();
      return;
    }
    if (!scheduled->sync) unsharded = std::exchange(sum, {});
    set_reduced(parameter, sum);
  }

  void set_reduced(const at::Tensor& parameter, const at::Tensor& sum) {
    auto& gradient = parameter.mutable_grad();
    gradient = sum.defined() ? reduced_mean(sum) : at::Tensor();
    if (!saved.defined()) return;
    const auto before = std::exchange(saved, {});
    gradient = gradient.defined() ? before.add_(gradient) : before;  // same memory in each step, for compiled steps
  }

  // At the end of a backward that did not reach the parameter.
  void reduce_earlier_passes() {
    auto impl = parameter.lock();
    if (!impl || !waits || !scheduled->sync) return;
    waits = false;
    const at::NoGradGuard no_grad;
    const at::Tensor leaf(std::move(impl));
    take_shown(leaf);
    auto sum = leaf.grad().defined() && !is_dtensor(leaf.grad()) ? leaf.grad() : std::exchange(unsharded, {});
    if (!sum.defined() && is_dtensor(leaf.grad())) return;  // the user has set another gradient
    const bool is_discarded = !sum.defined();
    if (is_discarded) sum = at::zeros(spec->sizes, at::TensorOptions(spec->device).dtype(spec->dtype));
    set_reduced(leaf, sum);  // with zeros, because other ranks take part
    if (is_discarded) leaf.mutable_grad().reset();
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

void UnhookedGroup::begin_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (std::exchange(graph_task, task) == task) return;
  torch::autograd::Engine::get_default_engine().queue_callback([self = shared_from_this()] {
    for (const auto& weak : self->gradients)
      if (const auto gradient = weak.lock()) gradient->reduce_earlier_passes();
  });
}

}  // namespace

void shard_unhooked_params(const std::vector<FSDPParam>& params, const std::shared_ptr<ScheduledGroup>& scheduled) {
  tessera::detail::register_kernels();
  const at::NoGradGuard no_grad;
  const auto group = std::make_shared<UnhookedGroup>();
  for (const auto& [name, tensor, unsharded_spec, sharded_spec] : params) {
    auto parameter = tensor;
    distribute_in_place(parameter, sharded_spec->mesh, sharded_spec->placements, {.src_data_rank = std::nullopt});
    tessera::detail::mark_all_gather_on_use(parameter);
    auto gradient = std::make_shared<UnhookedGradient>(name, sharded_spec, scheduled);
    gradient->group = group;
    gradient->parameter = decltype(gradient->parameter)(parameter.getIntrusivePtr());
    group->gradients.push_back(gradient);
    register_hook_on_any_leaf(parameter, [&](const at::Tensor& leaf) {  // a frozen one may be unfrozen later
      leaf.register_hook([gradient](const at::Tensor&) {
        if (auto impl = gradient->parameter.lock()) gradient->before_accumulate(at::Tensor(std::move(impl)));
      });
      return register_post_accumulate_grad_hook(leaf,
                                                [gradient](const at::Tensor& of) { gradient->gradient_ready(of); });
    });
  }
}

}  // namespace tessera::data_parallel::fsdp
