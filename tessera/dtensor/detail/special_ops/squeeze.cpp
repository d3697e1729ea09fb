#include <ATen/core/Tensor.h>
#include <ATen/ops/squeeze.h>
#include <torch/library.h>

// Views of local tensors (rules/view.cpp). squeeze: of the dims whose global size is 1; a local tensor may have more
// dims of size 1. resize: to as many elements.
namespace tessera {
namespace {

at::Tensor squeeze_all(const at::Tensor& self, at::IntArrayRef ones) { return at::squeeze(self, ones); }
at::Tensor squeeze_dim(const at::Tensor& self, int64_t, at::IntArrayRef ones) { return at::squeeze(self, ones); }
at::Tensor squeeze_dims(const at::Tensor& self, at::IntArrayRef, at::IntArrayRef ones) {
  return at::squeeze(self, ones);
}
at::Tensor resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  return self.view(size);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("squeeze(Tensor(a) self, int[] ones) -> Tensor(a)");
  m.def("squeeze.dim(Tensor(a) self, int dim, int[] ones) -> Tensor(a)");
  m.def("squeeze.dims(Tensor(a) self, int[] dim, int[] ones) -> Tensor(a)");
  m.def("resize(Tensor(a) self, int[] size, MemoryFormat? memory_format) -> Tensor(a)");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("squeeze", squeeze_all);
  m.impl("squeeze.dim", squeeze_dim);
  m.impl("squeeze.dims", squeeze_dims);
  m.impl("resize", resize);
}

}  // namespace tessera
