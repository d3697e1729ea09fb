#include "tessera/dtensor/detail/gathered_view.h"

#include "tessera/base/detail/same_storage.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/dtensor/detail/observer.h"
#include "tessera/dtensor/policy.h"
#include "tessera/redistribute/detail/execute.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/StringUtil.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

namespace tessera::detail {
namespace {

uint32_t version_of(const at::Tensor& t) { return t.is_inference() ? 0 : static_cast<uint32_t>(t._version()); }

// `local` with the placements of `to`. It is implicit communication, so
// CommPolicy applies.
at::Tensor redistributed(const at::Tensor& local, const TensorSpec& from, const TensorSpec& to, const char* what) {
  const auto& plan = redistribute::plan_between(from, to);
  if (plan.communicates() && comm_policy() != CommPolicy::Allow)
    check_policy(c10::str(what, " redistributes ", from.describe(), " to ", to_string(to.placements), "."));
  if (auto* observer = op_observer()) observer->redistributes(0, from, to, false);
  auto result = redistribute::execute(plan, local, from, to);
  if (result.pending) funcol::wait(result.tensor, result.pending);
  if (auto* observer = op_observer()) observer->redistributed();
  return result.tensor;
}

// One element for each memory location: dims with stride 0 in `like` have size 1.
at::Tensor without_repeats(at::Tensor t, const at::Tensor& like) {
  for (int64_t d = 0; d < like.dim(); d++)
    if (like.stride(d) == 0 && like.size(d) > 1) t = t.narrow(d, 0, 1);
  return t;
}

}  // namespace

c10::intrusive_ptr<GatheredBase> make_gathered_base(const at::Tensor& base, const at::Tensor& copy, SpecRef spec) {
  const auto& local = meta_of(base).local;
  if (same_storage(copy, local)) return {};
  auto gathered = c10::make_intrusive<GatheredBase>();
  gathered->base = base;
  gathered->copy = copy;
  gathered->spec = std::move(spec);
  gathered->version = version_of(local);
  gathered->node = torch::autograd::get_current_node().get();
  return gathered;
}

bool becomes_grad(const at::Tensor& view) {
  const auto node = torch::autograd::get_current_node();
  const auto* accumulates = dynamic_cast<const torch::autograd::AccumulateGrad*>(node.get());
  return accumulates && !accumulates->variable.grad().defined() && meta_of(view).gathered->node != node.get();
}

void refresh(GatheredBase& gathered) {
  const auto& local = local_of(gathered.base);
  // A plain alias of the base (to_local) may have been written, which no version counts.
  if (version_of(local) == gathered.version && !has_plain_alias(gathered.base)) return;
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& from = *meta_of(gathered.base).spec;
  const auto values = redistributed(local, from, *gathered.spec, "a view whose base was written");
  without_repeats(gathered.copy, gathered.copy).copy_(without_repeats(values, gathered.copy));
  if (!gathered.copy.is_inference()) gathered.copy.unsafeGetTensorImpl()->bump_version();
  gathered.version = version_of(local);
}

void copy_from_placements(const at::Tensor& to, const at::Tensor& local, const TensorSpec& spec) {
  at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor& target = local_of(to);
  const auto& end = *meta_of(to).spec;
  // A shard that is written back to a partial tensor is gathered first: only R can become partial.
  auto between = spec.placements;
  for (size_t axis = 0; axis < between.size(); axis++)
    if (end.placements[axis].is_partial() && between[axis] != end.placements[axis]) between[axis] = Replicate();
  const auto gathered = with_placements(spec, between);
  auto values = gathered.get() == &spec ? local : redistributed(local, spec, *gathered, "the write-back to a tensor");
  target.copy_(redistributed(values, *gathered, end, "the write-back to a tensor"));
  after_write(to);
}

void write_back(GatheredBase& gathered) {
  copy_from_placements(gathered.base, gathered.copy, *gathered.spec);
  gathered.version = version_of(meta_of(gathered.base).local);
}

}  // namespace tessera::detail
