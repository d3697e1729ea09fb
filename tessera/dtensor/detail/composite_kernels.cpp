#include "tessera/dtensor/detail/dispatch.h"

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/_unsafe_view.h>
#include <torch/library.h>

#include <unordered_set>

// Composite ops decompose above us, each the way LibTorch wrote it for plain tensors. Where that way is not ours, it is
// replaced here, at the autograd key, by one made of differentiable ops.
namespace tessera::detail {
namespace {

// reshape promises values, not an alias. LibTorch asks for a view whenever the strides allow one; ours must also keep
// every cut in place, or the tensor is copied, and gathered where it has to be.
at::Tensor reshape(const at::Tensor& self, c10::SymIntArrayRef shape) {
  static const auto& view = propagate::entry_of("aten::view");
  const auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(shape), self.numel());
  const bool alias = at::detail::computeStride(self.sizes(), self.strides(), sizes).has_value();
  if (alias && propagate::view_keeps_shards(view, *meta_of(self).spec, sizes)) return self.view(sizes);
  return at::_unsafe_view(self.clone(at::MemoryFormat::Contiguous), sizes);
}

}  // namespace

void register_composite_kernels(torch::Library& aten, torch::Library& aten_autograd,
                                std::unordered_set<std::string>& done) {
  aten_autograd.impl("reshape", TORCH_FN(reshape));
  aten.impl("reshape", TORCH_FN(reshape));  // in inference mode nothing stops at the autograd key
  // What LibTorch's own reshape calls; its stride argument is for a plain tensor.
  aten.impl("_reshape_alias",
            [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef) { return reshape(self, size); });
  done.insert("aten::_reshape_alias");
  // It has an autograd formula of its own, so a kernel of ours takes nothing away; decomposed, it would start from
  // plain zeros.
  const auto& selecting = propagate::entry_of("aten::value_selecting_reduction_backward");
  aten.impl("value_selecting_reduction_backward",
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedOpKernel>(selecting)));
}

}  // namespace tessera::detail
