#include "tessera/data_parallel/fsdp/detail/engine/unhooked_modules.h"

#include "tessera/tracing/detail/compiling_scope.h"
#include "tessera/data_parallel/fsdp/detail/engine/compiled_step.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/detail/edges.h"
#include "tessera/dtensor/detail/gather_at_use.h"
#include "tessera/dtensor/register.h"
#include "tessera/nn/grad_hooks.h"

#include <ATen/core/grad_mode.h>

namespace tessera::data_parallel::fsdp {
namespace {

// The gradient of one parameter.
struct Gradient : std::enable_shared_from_this<Gradient> {
  Gradient(std::string name, SpecRef spec, std::shared_ptr<Turn> turn)
      : name(std::move(name)), spec(std::move(spec)), turn(std::move(turn)) {}
  std::string name;
  SpecRef spec;
  std::shared_ptr<Turn> turn;
  at::Tensor aside = {};   // the reduced one of before, while a whole one comes
  at::Tensor kept = {};    // whole, of passes that were not to be reduced
  size_t compiled_in = 0;  // see compiled_step.h

  void before(const at::Tensor& parameter) {
    if (compiling() && std::exchange(compiled_in, CompilingScope::serial()) != CompilingScope::serial()) {
      note_in_compiled_step(turn);
      carry_in_compiled_step(shared_from_this(), kept);
    }
    if (is_dtensor(parameter.grad())) aside = std::exchange(parameter.mutable_grad(), {});
  }

  void came(const at::Tensor& parameter) {
    const at::NoGradGuard no_grad;
    auto whole = local_gradient(parameter.grad(), {}, name);
    if (kept.defined()) whole = std::exchange(kept, {}).add_(whole);
    if (!turn->sync) kept = std::exchange(whole, {});
    parameter.mutable_grad() = whole.defined() ? mean_of(whole) : at::Tensor();
    if (!aside.defined()) return;
    auto& gradient = parameter.mutable_grad();
    const auto before = std::exchange(aside, {});
    gradient = gradient.defined() ? before.add_(gradient) : before;  // stays where it was, for compiled steps
  }

  // Over all ranks of the mesh, this rank's piece of it. Cut first: copies need no more than their piece.
  at::Tensor mean_of(const at::Tensor& whole) const {
    const auto scaled = whole.contiguous().div(static_cast<double>(spec->mesh.size()));
    Placements lies(spec->placements.size(), Partial());
    const auto like = [&] {
      return intern(spec->mesh, lies, spec->sizes, spec->strides, whole.scalar_type(), whole.device());
    };
    auto sum = tessera::detail::wrap(scaled, like());
    lies.back() = spec->placements.back();
    sum = tessera::detail::move(sum, like());
    lies = spec->placements;
    return tessera::detail::move(sum, like());
  }
};

}  // namespace

void shard_unhooked(const std::vector<Member>& members, const std::shared_ptr<Turn>& turn) {
  tessera::detail::register_kernels();
  const at::NoGradGuard no_grad;
  for (const auto& [name, handle, outer, sharded] : members) {
    auto parameter = handle;
    distribute_in_place(parameter, sharded->mesh, sharded->placements, {.src_data_rank = std::nullopt});
    tessera::detail::mark_gather_at_use(parameter);
    if (!parameter.requires_grad()) continue;
    auto gradient = std::make_shared<Gradient>(name, sharded, turn);
    // A weak handle: the hooks are the parameter's own.
    const c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl> weak(parameter.getIntrusivePtr());
    parameter.register_hook([gradient, weak](const at::Tensor&) {
      if (auto impl = weak.lock()) gradient->before(at::Tensor(std::move(impl)));
    });
    register_post_accumulate_grad_hook(parameter, [gradient](const at::Tensor& leaf) { gradient->came(leaf); });
  }
}

}  // namespace tessera::data_parallel::fsdp
