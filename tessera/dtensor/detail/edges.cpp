#include "tessera/dtensor/detail/edges.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/libtorch_autograd_compat.h"
#include "tessera/base/detail/module_name.h"
#include "tessera/dtensor/detail/observer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/functions/utils.h>

namespace tessera::detail {

using torch::autograd::Node;
using torch::autograd::variable_list;

Placements gradient_placements(PlacementsRef value, PlacementsRef gradient) {
  Placements to;
  for (size_t a = 0; a < value.size(); a++) {
    const bool keep_sum = !value[a].is_sharded() && gradient[a].is_partial();
    to.push_back(keep_sum ? gradient[a] : value[a].is_sharded() ? value[a] : Replicate());
  }
  return to;
}

at::Tensor move(const at::Tensor& t, const SpecRef& to, bool is_explicit) {
  at::AutoDispatchBelowADInplaceOrView below;
  const auto& from = meta_of(t).spec;
  if (from == to) return share(t);
  if (from->device.is_meta()) return wrap(local_without_storage(local_of(t), *to), to);  // there is nothing to send
  if (auto* observer = op_observer()) observer->redistributes(0, *from, *to, is_explicit);
  const auto& plan = redistribute::plan_between(*from, *to);
  auto result = redistribute::execute(plan, local_of(t), *from, *to);
  if (auto* observer = op_observer()) observer->redistributed();
  return wrap(std::move(result.tensor), to, std::move(result.pending));
}

namespace {

// Gradients of distributed values must be distributed: a plain one would be taken for a piece by some and for the whole
// by others.
const at::Tensor& distributed(const at::Tensor& gradient, const char* of) {
  TESSERA_CHECK(
      is_dtensor(gradient), UsageError, "backward of ", of, ": the gradient is a plain tensor of sizes ",
      gradient.sizes(),
      "; give backward() a distributed one: distribute_tensor, DTensor::from_local, or ones_like of the value");
  return gradient;
}

// The same memory, and the same version: writing to one is seen at the other.
at::Tensor alias_of(const at::Tensor& t) {
  at::AutoDispatchBelowADInplaceOrView below;
  auto out = at::alias(t);
  if (!t.is_inference() && !out.is_inference())
    out.unsafeGetTensorImpl()->set_version_counter(t.unsafeGetTensorImpl()->version_counter());
  return out;
}

// What stands behind a value in the graph. A debug mode is told in backward which module the value was made in.
struct EdgeNode : Node {
  SpecRef spec;
  std::string module;  // set only while a debug mode looks
  variable_list apply(variable_list&& gradients) final {
    if (!gradients[0].defined()) return {at::Tensor()};
    if (module.empty()) return {gradient_of(gradients[0])};
    const ModuleNameScope running(module);
    return {gradient_of(gradients[0])};
  }
  virtual at::Tensor gradient_of(const at::Tensor& gradient) = 0;
};

// Runs `make` outside autograd and puts `Backward` behind its result. Each Backward is made of the functions below, so
// that it can be differentiated again.
template <class Backward, class Make>
at::Tensor with_history(const at::Tensor& input, SpecRef spec, Make make) {
  if (!at::GradMode::is_enabled() || !input.requires_grad()) return make();
  auto node = libtorch::make_node<Backward>();
  node->spec = std::move(spec);
  if (op_observer()) node->module = running_module();
  node->set_next_edges(torch::autograd::collect_next_edges(input));
  auto out = make();
  torch::autograd::set_history(out, node);
  return out;
}

struct RedistributeBackward final : EdgeNode {  // spec: of the value before it was moved
  at::Tensor gradient_of(const at::Tensor& g) override {
    const auto& gradient = distributed(g, "redistribute");
    return redistribute(gradient, gradient_placements(spec->placements, meta_of(gradient).spec->placements));
  }
};

struct FromLocalBackward final : EdgeNode {
  at::Tensor gradient_of(const at::Tensor& g) override {
    Placements to(spec->placements);
    for (auto& p : to)
      if (p.is_partial()) p = Replicate();
    return to_local(redistribute(distributed(g, "from_local"), to), {});
  }
};

struct ToLocalBackward final : EdgeNode {  // spec: of the gradient
  at::Tensor gradient_of(const at::Tensor& g) override {
    TESSERA_CHECK(!is_dtensor(g) && g.sizes() == c10::IntArrayRef(spec->local_sizes), UsageError,
                  "backward of to_local: the gradient has sizes ", g.sizes(), "; this rank's piece of ",
                  spec->describe(), " has ", c10::IntArrayRef(spec->local_sizes));
    auto as_found = intern(spec->mesh, spec->placements, spec->sizes, spec->strides, g.scalar_type(), g.device());
    return from_local(in_order_of(g, *as_found), as_found);
  }
};

}  // namespace

at::Tensor in_order_of(const at::Tensor& local, const TensorSpec& spec) {
  const auto strides = strides_in_order_of(spec.local_sizes, spec.strides);
  bool fits = true;
  for (int64_t d = 0; d < local.dim(); d++) fits &= local.size(d) <= 1 || local.stride(d) == strides[d];
  if (fits || local.numel() == 0) return local;
  if (strides == tessera::contiguous_strides(spec.local_sizes)) return local.contiguous();
  return at::empty_strided(spec.local_sizes, strides, local.options()).copy_(local);
}

at::Tensor from_local(const at::Tensor& local, const SpecRef& spec) {
  return with_history<FromLocalBackward>(local, spec, [&] {
    auto out = wrap(alias_of(local), spec);
    meta_of(out).escaped = true;
    return out;
  });
}

at::Tensor to_local(const at::Tensor& t, PlacementsRef grad_placements) {
  auto spec = meta_of(t).spec;
  if (!grad_placements.empty()) spec = with_placements(*spec, grad_placements);
  return with_history<ToLocalBackward>(t, spec, [&] {
    meta_of(t).escaped = true;
    return alias_of(local_of(t));
  });
}

at::Tensor redistribute(const at::Tensor& t, PlacementsRef placements) {
  const auto& from = meta_of(t).spec;
  auto to = with_placements(*from, placements);
  return with_history<RedistributeBackward>(t, from, [&] { return move(t, to); });
}

}  // namespace tessera::detail
