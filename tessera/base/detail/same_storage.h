#pragma once
#include <ATen/core/Tensor.h>

namespace tessera {

// True if both tensors have the same storage. Unlike is_alias_of() it does not ask for a pointer to the memory, which
// throws while a step is traced.
inline bool same_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

}  // namespace tessera
