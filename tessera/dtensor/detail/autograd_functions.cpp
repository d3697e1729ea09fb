#include "tessera/dtensor/detail/autograd_functions.h"

#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/detail/module_name.h"
#include "tessera/base/detail/same_storage.h"
#include "tessera/base/error.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/detail/local_origin.h"
#include "tessera/dtensor/detail/observer.h"
#include "tessera/tracing/detail/tracer_key.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/AutogradState.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <unordered_set>

namespace tessera::detail {

using torch::autograd::Node;
using torch::autograd::variable_list;

Placements gradient_placements(PlacementsRef value, PlacementsRef gradient) {
  Placements to;
  for (size_t a = 0; a < value.size(); a++) {
    const bool keep_partial = !value[a].is_sharded() && gradient[a].is_partial();
    to.push_back(keep_partial ? gradient[a] : value[a].is_sharded() ? value[a] : Replicate());
  }
  return to;
}

at::Tensor redistribute_no_grad(const at::Tensor& t, const SpecRef& to, bool is_explicit) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& from = meta_of(t).spec;
  if (from == to) return share(t);
  if (from->device.is_meta()) return wrap(local_without_storage(local_of(t), *to), to);  // no values to send
  if (auto* observer = op_observer()) observer->redistributes(0, *from, *to, is_explicit);
  const auto& plan = redistribute::plan_between(*from, *to);
  const auto& local = local_of(t);
  auto result = redistribute::execute(plan, local, *from, *to);
  if (auto* observer = op_observer()) observer->redistributed();
  if (result.tensor.is_same(local)) return wrap_alias(local, to, t);  // only the placements change
  return wrap(std::move(result.tensor), to, std::move(result.pending));
}

namespace {

// The gradient of a DTensor must be a DTensor. A plain gradient could be the local or the global one.
const at::Tensor& check_dtensor_gradient(const at::Tensor& gradient, const char* function) {
  TESSERA_CHECK(is_dtensor(gradient), UsageError, "backward of ", function,
                ": the gradient is a plain tensor of sizes ", gradient.sizes(),
                "; pass a DTensor to backward(): distribute_tensor, DTensor::from_local, or ones_like of the value");
  return gradient;
}

// The placements of a gradient that is exchanged with a plain tensor.
Placements without_partial(PlacementsRef placements) {
  Placements to(placements.begin(), placements.end());
  for (auto& p : to)
    if (p.is_partial()) p = Replicate();
  return to;
}

at::Tensor alias_of(const at::Tensor& t) {
  const auto* impl = t.unsafeGetTensorImpl();
  if (C10_UNLIKELY(tracing() || !t.has_storage())) {
    at::AutoDispatchBelowADInplaceOrView below;
    return at::alias(t);
  }
  auto out = at::detail::make_tensor_base<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(impl->unsafe_storage()),
                                                           impl->key_set(), impl->dtype());
  out.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), impl->storage_offset());
  return at::Tensor(std::move(out));
}

// Base class of the autograd nodes below. Under a debug mode, backward runs under the name of the module that made the
// value.
struct SpecNode : Node {
  SpecRef spec;
  std::string module;  // set only under a debug mode
  variable_list apply(variable_list&& gradients) final {
    if (!gradients[0].defined()) return {at::Tensor()};
    if (module.empty()) return {gradient_of(gradients[0])};
    const ModuleNameScope running(module);
    return {gradient_of(gradients[0])};
  }
  virtual at::Tensor gradient_of(const at::Tensor& gradient) = 0;
};

// How autograd makes a view of ours again. It calls this for the base, after a write through another view, and for the
// gradient of the base, in the backward of a write through this view.
template <class F>
struct ReplayedView final : torch::autograd::ViewFunc {
  F replay;
  explicit ReplayedView(F f) : replay(std::move(f)) {}
  at::Tensor operator()(const at::Tensor& base) const override { return replay(base); }
  std::unique_ptr<ViewFunc> clone_and_set(std::optional<std::vector<c10::SymInt>>,
                                          std::optional<std::vector<at::Tensor>>) const override {
    return std::make_unique<ReplayedView>(replay);
  }
};

// Does not wait for a pending collective: its result has its storage already.
bool shares_memory(const at::Tensor& input, const at::Tensor& out) {
  const auto memory = [](const at::Tensor& t) -> const at::Tensor& { return is_dtensor(t) ? meta_of(t).local : t; };
  return !input.is_meta() && same_storage(memory(input), memory(out));
}

// Returns make() with `Backward` as its grad_fn. Each Backward calls only differentiable functions, so double backward
// works. A result that shares the memory of `input` is a view of it for autograd: both have one version counter, and a
// write through one changes the history of the other. Without grad mode only the counter is shared, so that the result
// does not keep the graph of the input.
template <class Backward, class Make, class Replay>
at::Tensor with_history(const at::Tensor& input, SpecRef spec, Make make, Replay replay) {
  auto out = make();
  const bool records = at::GradMode::is_enabled();
  if (!input.is_inference() && !out.is_inference() && shares_memory(input, out)) {
    share_version_counter(input, out);
    if (records) {
      c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
      out = torch::autograd::as_view(input, out, true, true, std::make_unique<ReplayedView<Replay>>(std::move(replay)));
    }
  }
  if (!records || !input.requires_grad()) return out;
  auto node = libtorch::make_node<Backward>();
  node->spec = std::move(spec);
  if (op_observer()) node->module = running_module();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  torch::autograd::set_history(out, node);
  return out;
}

struct RedistributeBackward final : SpecNode {  // spec: of the input
  at::Tensor gradient_of(const at::Tensor& g) override {
    const auto& gradient = check_dtensor_gradient(g, "redistribute");
    return redistribute(gradient, gradient_placements(spec->placements, meta_of(gradient).spec->placements));
  }
};

struct FromLocalBackward final : SpecNode {
  at::Tensor gradient_of(const at::Tensor& g) override {
    return redistribute_to_local(check_dtensor_gradient(g, "from_local"), without_partial(spec->placements));
  }
};

struct ToLocalBackward final : SpecNode {  // spec: of the gradient
  at::Tensor gradient_of(const at::Tensor& g) override {
    TESSERA_CHECK(!is_dtensor(g) && g.sizes() == c10::IntArrayRef(spec->local_sizes), UsageError,
                  "backward of to_local: the gradient has sizes ", g.sizes(), "; the local tensor of ",
                  spec->describe(), " has ", c10::IntArrayRef(spec->local_sizes));
    const bool same = g.scalar_type() == spec->dtype && g.device() == spec->device;
    const auto as_found =
        same ? spec : intern(spec->mesh, spec->placements, spec->sizes, spec->strides, g.scalar_type(), g.device());
    return from_local(match_strides(g, *as_found), as_found);
  }
};

}  // namespace

at::Tensor match_strides(const at::Tensor& local, const TensorSpec& spec) {
  const auto strides = strides_in_order_of(spec.local_sizes, spec.strides);
  bool fits = true;
  for (int64_t d = 0; d < local.dim(); d++) fits &= local.size(d) <= 1 || local.stride(d) == strides[d];
  if (fits || local.numel() == 0) return local;
  if (strides == tessera::contiguous_strides(spec.local_sizes)) return local.contiguous();
  return at::empty_strided(spec.local_sizes, strides, local.options()).copy_(local);
}

at::Tensor from_local(const at::Tensor& local, const SpecRef& spec) {
  const auto make = [&] {
    auto out = wrap(alias_of(local), spec);
    meta_of(out).has_plain_alias = true;
    return out;
  };
  const auto replay = [spec](const at::Tensor& base) {
    const auto placements = in_backward() ? without_partial(spec->placements) : spec->placements;
    return from_local(base,
                      intern(spec->mesh, placements, spec->sizes, spec->strides, base.scalar_type(), base.device()));
  };
  return with_history<FromLocalBackward>(local, spec, make, replay);
}

at::Tensor to_local(const at::Tensor& t, PlacementsRef grad_placements) {
  auto spec = meta_of(t).spec;
  if (!grad_placements.empty()) spec = with_placements(*spec, grad_placements);
  const auto make = [&] {
    set_plain_alias(t);
    return alias_of(local_of(t));
  };
  const auto replay = [value = meta_of(t).spec, gradient = Placements(grad_placements)](const at::Tensor& base) {
    const auto found = meta_of(base).spec;
    if (PlacementsRef(found->placements) != PlacementsRef(value->placements)) {
      // A gradient with other placements. Autograd made it for this call, so it can change in place.
      const auto to = with_placements(*found, without_partial(value->placements));
      const auto placed = redistribute_no_grad(base, to);
      replace(base, local_of(placed), to);
    }
    return to_local(base, gradient);
  };
  return with_history<ToLocalBackward>(t, spec, make, replay);
}

at::Tensor redistribute(const at::Tensor& t, PlacementsRef placements) {
  const auto& from = meta_of(t).spec;
  auto to = with_placements(*from, placements);
  // The result has memory of its own, without gaps: its strides are those of clone().
  if (C10_UNLIKELY(!from->prototype->is_non_overlapping_and_dense()) &&
      !redistribute::plan_between(*from, *to).only_relabels())
    to = intern(to->mesh, placements, to->sizes, strides_in_order_of(to->sizes, to->strides), to->dtype, to->device);
  const auto replay = [from, to](const at::Tensor& base) {
    const bool is_gradient = PlacementsRef(meta_of(base).spec->placements) != PlacementsRef(from->placements);
    return is_gradient ? at::alias(base) : redistribute(base, to->placements);
  };
  return with_history<RedistributeBackward>(
      t, from, [&] { return redistribute_no_grad(t, to); }, replay);
}

at::Tensor redistribute_to_local(const at::Tensor& t, PlacementsRef placements) {
  const auto& from = *meta_of(t).spec;
  if (PlacementsRef(from.placements) == placements) return to_local(t, {});
  if (from.mesh.size() == 1) return to_local(t, gradient_placements(from.placements, placements));
  return to_local(redistribute(t, placements), {});
}

// Breadth first: the result is the nearest one.
SpecRef local_origin(const at::Tensor& t) {
  const auto& last = t.grad_fn();
  if (!last) return {};
  std::vector<const Node*> nodes{last.get()};
  std::unordered_set<const Node*> seen{last.get()};
  for (size_t i = 0; i < nodes.size(); i++) {
    if (const auto* to_local = dynamic_cast<const ToLocalBackward*>(nodes[i])) return to_local->spec;
    for (const auto& edge : nodes[i]->next_edges())
      if (edge.function && seen.insert(edge.function.get()).second) nodes.push_back(edge.function.get());
  }
  return {};
}

}  // namespace tessera::detail
