#include <ATen/core/Tensor.h>
#include <ATen/ops/squeeze.h>
#include <torch/library.h>

// squeeze of the dims whose global size is 1. A local tensor may have more dims of size 1 (rules/view.cpp).
namespace tessera {
namespace {

at::Tensor squeeze_all(const at::Tensor& self, at::IntArrayRef ones) { return at::squeeze(self, ones); }
at::Tensor squeeze_dim(const at::Tensor& self, int64_t, at::IntArrayRef ones) { return at::squeeze(self, ones); }
at::Tensor squeeze_dims(const at::Tensor& self, at::IntArrayRef, at::IntArrayRef ones) {
  return at::squeeze(self, ones);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("squeeze(Tensor(a) self, int[] ones) -> Tensor(a)");
  m.def("squeeze.dim(Tensor(a) self, int dim, int[] ones) -> Tensor(a)");
  m.def("squeeze.dims(Tensor(a) self, int[] dim, int[] ones) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("squeeze", squeeze_all);
  m.impl("squeeze.dim", squeeze_dim);
  m.impl("squeeze.dims", squeeze_dims);
}

}  // namespace tessera
