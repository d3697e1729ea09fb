#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/Tensor.h>

// A DTensor is an at::Tensor with dispatch key PrivateUse3, global sizes, no storage, and a DTensorMeta as its
// BackendMeta. The TensorImpl subclass has no members of its own. So `parameter.set_data(dtensor)` makes a plain
// parameter distributed in place, and every handle to it sees the change.
namespace tessera {

// What a view that communicated knows about its base. In backward a view may redistribute its base first. Its local
// tensor then aliases `copy`, not the base. Reads take later writes to the base along, and writes are written back:
//
//   base  S(0)  --redistribute-->  copy  R  <--alias--  view  (slice of dim 0)
//         S(0)  <--write_back----        R
//
// All views of the view share this object.
struct GatheredBase final : c10::intrusive_ptr_target {
  at::Tensor base;       // a DTensor
  at::Tensor copy;       // its local tensor in the placements of `spec`
  SpecRef spec;          // of `copy`
  uint32_t version = 0;  // of the base's local tensor when both had the same values
  const void* node;      // the autograd node in which the view was made; only compared
};

// Version counters. The counter of the DTensor is the one that autograd checks; plain tensors that share the memory
// (from_local, to_local) have it too. The counter of `local` counts writes by ops on DTensors only, so it is the same
// on all ranks, and decisions to communicate can depend on it.
struct DTensorMeta final : c10::BackendMeta {
  at::Tensor local;  // this rank's local tensor; read it through local_of(), which waits for `pending`
  SpecRef spec;
  // The group of an asynchronous collective that still fills `local`; null: ready. Detached copies share this meta, so
  // one wait serves all of them.
  comm::Group pending;

  // The user has a plain tensor that shares memory with `local` (from_local, to_local). Read and set it through
  // has_plain_alias() and set_plain_alias(), which know of the base of a view.
  bool has_plain_alias = false;

  // A parameter of a module that parallelize_module handles without input hooks: ops treat plain tensors next to it as
  // Replicate.
  bool accepts_plain = false;

  // The last implicit redistribution of `local`, so that a value that two ops use is redistributed once. It is valid
  // while both version counters are unchanged.
  struct CachedRedistribution {
    at::Tensor local;
    SpecRef spec;
    uint32_t source_version = 0;  // of DTensorMeta::local
    uint32_t version = 0;         // of `local` here: an op may write to a view of it
  };
  CachedRedistribution cached;

  // Of a view that communicated, else null.
  c10::intrusive_ptr<GatheredBase> gathered;

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

// Waits for `pending`. Brings the copy of `gathered` up to date, which may communicate.
void make_ready(DTensorMeta& meta);

// This rank's local tensor, ready to be read. Requires is_dtensor(t).
inline const at::Tensor& local_of(const at::Tensor& t) {
  auto& meta = meta_of(t);
  if (C10_UNLIKELY(static_cast<bool>(meta.pending) || static_cast<bool>(meta.gathered))) make_ready(meta);
  return meta.local;
}

// Called after an op wrote to the local tensor of `t`: counts the write, and writes back to the base of a view that
// communicated. Does nothing for a plain tensor.
void after_write(const at::Tensor& t);

// True if a plain tensor shares memory with the local tensor of `t` or of its base.
bool has_plain_alias(const at::Tensor& t);
void set_plain_alias(const at::Tensor& t);

// The local tensor of a DTensor; a plain tensor itself.
inline const at::Tensor& local_or_self(const at::Tensor& t) { return is_dtensor(t) ? local_of(t) : t; }

// A DTensor around a local tensor. Requires: `local` has the spec's local_sizes, dtype and device.
at::Tensor wrap(at::Tensor local, SpecRef spec);
at::Tensor wrap(at::Tensor local, SpecRef spec, comm::Group pending);
// The local tensor of `spec` for a tensor on the meta device, global or local: a tensor without memory in the local
// sizes. It keeps the dispatch keys and the BackendMeta of `t`, so that a recorded initialization (deferred_init)
// stays.
at::Tensor local_without_storage(const at::Tensor& t, const TensorSpec& spec);
// Another DTensor with the same meta, as detach() returns it. Keeps the keys, as inference mode requires.
at::Tensor share(const at::Tensor& t);
// A DTensor around `local`, which shares memory with the local tensor of `base`.
at::Tensor wrap_alias(at::Tensor local, SpecRef spec, const at::Tensor& base);
// Gives `to` the version counter of `from`.
void share_version_counter(const at::Tensor& from, const at::Tensor& to);
// Replaces the meta of `t`, and its sizes by those of `spec` (for in-place ops that change geometry: t_, squeeze_).
void replace(const at::Tensor& t, at::Tensor local, SpecRef spec);

}  // namespace detail
}  // namespace tessera
