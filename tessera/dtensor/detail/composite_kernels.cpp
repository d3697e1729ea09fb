#include "tessera/base/error.h"
#include "tessera/dtensor/detail/arguments.h"
#include "tessera/dtensor/detail/attention_of_scope.h"
#include "tessera/dtensor/detail/dispatch.h"
#include "tessera/dtensor/dtensor.h"
#include "tessera/dtensor/policy.h"

#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/ops/_unsafe_view.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/max_pool1d_with_indices.h>
#include <ATen/ops/tensor_split.h>
#include <torch/library.h>

#include <unordered_set>

// Composite ops decompose above our dispatch key, as LibTorch wrote them for plain tensors. Where that decomposition
// does not suit DTensors, this file replaces it at the autograd key by a sequence of differentiable ops.
namespace tessera::detail {
namespace {

// reshape returns a view if possible, else a copy. LibTorch calls view() whenever the strides allow it. On a DTensor
// the view must also keep all shards on their ranks. Otherwise the tensor is copied, and all-gathered if necessary.
at::Tensor reshape(const at::Tensor& self, c10::SymIntArrayRef shape) {
  static const auto& view = propagate::entry_of("aten::view");
  const auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(shape), self.numel());
  const bool alias = at::detail::computeStride(self.sizes(), self.strides(), sizes).has_value();
  if (alias && propagate::view_keeps_shards(view, *meta_of(self).spec, sizes)) return self.view(sizes);
  return at::_unsafe_view(self.clone(at::MemoryFormat::Contiguous), sizes);
}

// resize_ to as many elements is a view in place. Where that cannot keep the shards, the tensor is redistributed to new
// memory, if no other tensor shares its present memory.
const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  static const auto &entry = propagate::entry_of("aten::resize_"), &view = propagate::entry_of("aten::view");
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const bool is_view = self.numel() == c10::multiply_integers(sizes) && self.is_contiguous();
  if (is_view && !propagate::view_keeps_shards(view, *meta_of(self).spec, sizes)) {
    const auto& local = local_of(self);
    TESSERA_CHECK(
        local.use_count() == 1 && local.storage().use_count() == 1, ShardingError, "aten::resize_ of ",
        meta_of(self).spec->describe(), " to ", sizes,
        ": an in-place view cannot keep these shards, and other tensors share the memory; redistribute first");
    const auto moved = reshape(self, size);
    replace(self, local_of(moved), meta_of(moved).spec);
    return self;
  }
  torch::jit::Stack stack{self, sizes.vec(), format};
  dispatch_boxed(entry, &stack);
  return self;
}

// one_hot(self, num_classes). LibTorch's code scatters into plain zeros.
at::Tensor one_hot(const at::Tensor& self, int64_t num_classes) {
  TORCH_CHECK(self.scalar_type() == at::kLong, "one_hot is only applicable to index tensor of type LongTensor.");
  TORCH_CHECK(num_classes != -1 || self.numel() > 0, "Can not infer total number of classes from empty tensor.");
  if (num_classes == -1) num_classes = self.max().item<int64_t>() + 1;
  TORCH_CHECK(num_classes >= 1, "num_classes should be positive");
  const ImplicitReplication classes_are_plain;
  return self.unsqueeze(-1).eq(at::arange(num_classes, self.options())).to(at::kLong);
}

// Composite ops whose code makes tensors of its own, such as masks and windows. They are plain and equal on all ranks,
// so they count as Replicate. Plain tensors that the caller gave are rejected first, as elsewhere.
constexpr const char* kMakesPlainTensors[] = {
    "combinations", "istft",           "linalg_matrix_power",          "nanquantile", "nanquantile.scalar",
    "quantile",     "quantile.scalar", "scaled_dot_product_attention", "stft",        "stft.center"};

// Composite ops without a derivative whose code writes into plain tensors. They run gathered.
constexpr const char* kGatheredComposites[] = {"linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float",
                                               "linalg_matrix_rank.atol_rtol_tensor", "linalg_matrix_rank.tol_tensor"};

struct WithPlainTensors final : c10::OperatorKernel {
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    const auto& entry = propagate::entry_of(op);
    if (entry.name == "aten::scaled_dot_product_attention")
      if (const auto of_scope = attention_of_scope.load(); of_scope && of_scope(*stack)) return;
    promote_plain_tensors(entry, stack->data() + (stack->size() - entry.num_args()));
    const ImplicitReplication made_here;
    op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
  }
};

// tensor_split by a tensor of indices. LibTorch's code reads their memory.
std::vector<at::Tensor> tensor_split(const at::Tensor& self, const at::Tensor& indices, int64_t dim) {
  const auto plain = is_dtensor(indices) ? DTensor(indices).full_tensor() : indices;
  if (plain.dim() == 0) return at::tensor_split(self, plain.item<int64_t>(), dim);
  const auto list = plain.to(at::kLong).contiguous();
  return at::tensor_split(self, at::IntArrayRef(list.const_data_ptr<int64_t>(), static_cast<size_t>(list.numel())),
                          dim);
}

// LibTorch's code reads the memory of a tensor that does not require gradients.
at::Tensor max_pool1d(const at::Tensor& self, at::IntArrayRef kernel_size, at::IntArrayRef stride,
                      at::IntArrayRef padding, at::IntArrayRef dilation, bool ceil_mode) {
  return std::get<0>(at::max_pool1d_with_indices(self, kernel_size, stride, padding, dilation, ceil_mode));
}

}  // namespace

void register_composite_kernels(torch::Library& aten, torch::Library& aten_autograd,
                                std::unordered_set<std::string>& done) {
  aten_autograd.impl("reshape", TORCH_FN(reshape));
  aten.impl("reshape", TORCH_FN(reshape));  // inference mode skips the autograd key
  for (const char* name : kMakesPlainTensors)
    for (auto* library : {&aten_autograd, &aten})
      library->impl(name, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<WithPlainTensors>()));
  for (const std::string name : kGatheredComposites) {
    const auto& entry = propagate::entry_of("aten::" + name);
    aten.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedOpKernel>(entry)));
  }
  aten_autograd.impl("tensor_split.tensor_indices_or_sections", TORCH_FN(tensor_split));
  aten.impl("tensor_split.tensor_indices_or_sections", TORCH_FN(tensor_split));
  aten.impl("resize_", TORCH_FN(resize));
  done.insert("aten::resize_");
  aten_autograd.impl("max_pool1d", TORCH_FN(max_pool1d));
  aten.impl("max_pool1d", TORCH_FN(max_pool1d));
  aten_autograd.impl("one_hot", TORCH_FN(one_hot));
  aten.impl("one_hot", TORCH_FN(one_hot));
  // LibTorch's own reshape calls this op, with strides that are valid for a plain tensor only.
  aten.impl("_reshape_alias",
            [](const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef) { return reshape(self, size); });
  done.insert("aten::_reshape_alias");
  // This composite op has an autograd formula, so our kernel hides no decomposition that autograd needs. The
  // decomposition would start from plain zeros.
  const auto& selecting = propagate::entry_of("aten::value_selecting_reduction_backward");
  aten.impl("value_selecting_reduction_backward",
            torch::CppFunction::makeFromBoxedFunctor(std::make_unique<BoxedOpKernel>(selecting)));
}

}  // namespace tessera::detail
