#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>
#include <torch/library.h>

namespace tessera {
namespace {

// A DTensor has no conjugate bit; its local tensor may have one, and view_as_real throws for it. So the local tensor is
// copied then, and the result is not an alias.
at::Tensor view_as_real_local(const at::Tensor& self) { return at::view_as_real(self.resolve_conj()); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) { m.def("view_as_real_local(Tensor(a) self) -> Tensor(a)"); }

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) { m.impl("view_as_real_local", view_as_real_local); }

}  // namespace tessera
