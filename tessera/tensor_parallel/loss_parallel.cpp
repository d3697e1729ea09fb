#include "tessera/tensor_parallel/loss_parallel.h"

#include "tessera/tensor_parallel/detail/vocab_parallel_cross_entropy.h"
#include "tessera/tracing/detail/invariant_scope.h"

#include <ATen/ops/cross_entropy_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/nll_loss2d_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/nll_loss_compositeimplicitautograd_dispatch.h>
#include <ATen/ops/nll_loss_nd_compositeimplicitautograd_dispatch.h>
#include <torch/library.h>

namespace tessera {
namespace {

using at::Tensor;
using Weight = std::optional<Tensor>;

thread_local int scopes_open = 0;

// Under Numerics::Invariant, the composite losses sum over sharded classes in the order of global indices.
bool is_active() { return scopes_open > 0 && !invariant_scope_is_open(); }

CrossEntropyOptions options_of(const Weight& weight, int64_t reduction, const c10::SymInt& ignore_index,
                               double label_smoothing) {
  return {.weight = weight.value_or(Tensor()),
          .reduction = static_cast<at::Reduction::Reduction>(reduction),
          .ignore_index = ignore_index.expect_int(),
          .label_smoothing = label_smoothing};
}

Tensor cross_entropy_loss(const Tensor& self, const Tensor& target, const Weight& weight, int64_t reduction,
                          c10::SymInt ignore_index, double label_smoothing) {
  const bool probabilities = self.sizes() == target.sizes();  // LibTorch's criterion
  if (is_active() && !probabilities && classes_are_sharded(self))
    return vocab_parallel_cross_entropy(self, target, options_of(weight, reduction, ignore_index, label_smoothing));
  return at::compositeimplicitautograd::cross_entropy_loss_symint(self, target, weight, reduction,
                                                                  std::move(ignore_index), label_smoothing);
}

// nll_loss has three ops, for different shapes of the log-probabilities.
using Nll = Tensor(const Tensor&, const Tensor&, const Weight&, int64_t, c10::SymInt);
template <Nll* composite>
Tensor nll_loss(const Tensor& self, const Tensor& target, const Weight& weight, int64_t reduction,
                c10::SymInt ignore_index) {
  if (is_active() && classes_are_sharded(self))
    return vocab_parallel_nll_loss(self, target, options_of(weight, reduction, ignore_index, 0));
  return composite(self, target, weight, reduction, std::move(ignore_index));
}

// These ops are composite: LibTorch decomposes them above the PrivateUse3 kernels. So they are overridden at the
// autograd key, and at PrivateUse3 for inference mode. This happens when the library is loaded, because a scope must
// not change kernels while another thread computes a loss.
void override_losses(torch::Library& aten) {
  namespace composite = at::compositeimplicitautograd;
  aten.impl("cross_entropy_loss", TORCH_FN(cross_entropy_loss));
  aten.impl("nll_loss_nd", TORCH_FN(nll_loss<composite::nll_loss_nd_symint>));
  aten.impl("nll_loss", TORCH_FN(nll_loss<composite::nll_loss_symint>));
  aten.impl("nll_loss2d", TORCH_FN(nll_loss<composite::nll_loss2d_symint>));
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse3, m) { override_losses(m); }
TORCH_LIBRARY_IMPL(aten, PrivateUse3, m) { override_losses(m); }

}  // namespace

LossParallel::LossParallel() { scopes_open++; }
LossParallel::~LossParallel() { scopes_open--; }

}  // namespace tessera
