#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/placement/detail/tensor_spec.h"

namespace tessera::compiler {

// Programs work on local tensors. These two remember and restore the DTensor around one.

// The spec of a DTensor; null for a plain or undefined tensor.
inline SpecRef spec_or_null(const at::Tensor& t) {
  return t.defined() && is_dtensor(t) ? tessera::detail::meta_of(t).spec : SpecRef();
}

// A DTensor with this spec around `local`; `local` itself if the spec is null.
inline at::Tensor wrap_with_spec(at::Tensor local, const SpecRef& spec) {
  return local.defined() && spec ? tessera::detail::wrap(std::move(local), spec) : local;
}

}  // namespace tessera::compiler
