#include "tessera/base/error.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <torch/library.h>

// tessera::check_equal: torch::equal() in a compiled step. The host code of the step branched on the result, so the
// program holds only while the result is the one of the trace.
namespace tessera::compiler {
namespace {

void check_equal_kernel(const at::Tensor& a, const at::Tensor& b, bool traced) {
  const bool now = at::equal(a, b);
  TESSERA_CHECK(
      now == traced, UsageError, "compile: torch::equal() of two tensors of shape ", a.sizes(), " is ",
      now ? "true" : "false", "; it was ", traced ? "true" : "false",
      " when the step was compiled, and the step may depend on it (nn::MultiheadAttention compares query, key "
      "and value). Pass the same tensor where they are equal");
}

// tessera::check_value: an integer or a flag that a formula of backward has read on the host.
void check_value_kernel(const at::Tensor& x, const at::Scalar& traced) {
  const auto now = x.item();
  TESSERA_CHECK(now.toLong() == traced.toLong(), UsageError, "compile: the backward of the step reads a value that is ",
                now.toLong(), " in this run; it was ", traced.toLong(),
                " when the step was compiled, and the formula depends on it. It tells whether there is a special case, "
                "such as a NaN in the input of max(), or a zero in the input of prod() or cumprod(). Run the step in "
                "eager mode for such inputs");
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("check_equal(Tensor a, Tensor b, bool traced) -> ()",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(check_equal_kernel)));
  m.def("check_value(Tensor x, Scalar traced) -> ()",
        torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(check_value_kernel)));
}

}  // namespace
}  // namespace tessera::compiler
