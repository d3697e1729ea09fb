#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/Tensor.h>

// What makes an at::Tensor a distributed one: the key PrivateUse3, global sizes without storage, and this in its
// BackendMeta slot. No members in a subclass: so `parameter.set_data(dtensor)` turns a plain parameter, and every
// handle to it, into a distributed one in place.
namespace tessera {

struct DTensorMeta final : c10::BackendMeta {
  at::Tensor local;  // this rank's piece; read it through local(), which waits
  SpecRef spec;
  // A collective that still fills `local`. Shared by detached copies, and so settled for all of them at once.
  comm::Group pending;

  // Someone holds `local`, or memory it shares, as a plain tensor (from_local, to_local).
  bool escaped = false;

  // A parameter of a planned module whose input is replicated: plain tensors next to it count as Replicate.
  bool takes_plain = false;

  // The last redistribution of `local`, so that a value used twice is moved once. Holds while the local's version does.
  at::Tensor remembered;
  SpecRef remembered_spec;
  uint32_t remembered_version = 0;      // of `local` then
  uint32_t remembered_own_version = 0;  // of `remembered` then: a view of it may have been written to

  DTensorMeta(at::Tensor local, SpecRef spec) : local(std::move(local)), spec(std::move(spec)) {}
  static void* operator new(size_t bytes);
  static void operator delete(void* memory);
};

inline bool is_dtensor(const at::Tensor& t) {
  return t.defined() && t.unsafeGetTensorImpl()->key_set().has_backend(c10::BackendComponent::PrivateUse3Bit);
}

namespace detail {

// Requires is_dtensor(t).
inline DTensorMeta& meta_of(const at::Tensor& t) {
  return *static_cast<DTensorMeta*>(t.unsafeGetTensorImpl()->get_backend_meta());
}
inline const TensorSpec* spec_or_null(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  if (!impl->key_set().has_backend(c10::BackendComponent::PrivateUse3Bit)) return nullptr;
  return static_cast<DTensorMeta*>(impl->get_backend_meta())->spec.get();
}

void settle(DTensorMeta& meta);  // waits for meta.pending

// This rank's piece, ready to be read.
inline const at::Tensor& local_of(const at::Tensor& t) {
  auto& meta = meta_of(t);
  if (C10_UNLIKELY(static_cast<bool>(meta.pending))) settle(meta);
  return meta.local;
}

// The local tensor of a DTensor; a plain tensor itself.
inline const at::Tensor& local_or_self(const at::Tensor& t) { return is_dtensor(t) ? local_of(t) : t; }

// A distributed tensor around a local one. Requires: local has spec.local_sizes, dtype and device.
at::Tensor wrap(at::Tensor local, SpecRef spec);
at::Tensor wrap(at::Tensor local, SpecRef spec, comm::Group pending);
// This rank's piece of a tensor on the meta device, whole or itself a piece: the same without memory, in other sizes.
// It keeps the keys and the BackendMeta that someone hung on it, so a recipe (deferred_init's) travels along.
at::Tensor local_without_storage(const at::Tensor& t, const TensorSpec& spec);
// Another tensor with the same meta (detach). Keeps the keys, so that it also serves in inference mode.
at::Tensor share(const at::Tensor& t);
// In-place ops that change geometry (t_, squeeze_): gives `t` another meta and the sizes of its spec.
void replace(const at::Tensor& t, at::Tensor local, SpecRef spec);

}  // namespace detail
}  // namespace tessera
