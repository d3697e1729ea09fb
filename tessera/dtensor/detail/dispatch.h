#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/dtensor/detail/observer.h"
#include "tessera/propagate/detail/choose.h"
#include "tessera/propagate/detail/decision.h"
#include "tessera/propagate/detail/key.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/stack.h>

// An op on DTensors runs in five steps (dispatch_boxed in dispatch.cpp):
//
//   read                 builds a key from the specs of the tensors and the values of the other arguments
//   choose               finds the cached decision for that key, or derives one from the sharding rules
//   redistribute_inputs  communicates where the decision needs other placements; replaces DTensors by local tensors
//   run_local            runs the aten op on the local tensors
//   wrap_outputs         makes DTensors of the results
//
// Every op has this boxed kernel. About thirty hot ops have a typed kernel in front of it (typed_kernel.h). The typed
// kernel handles a cache hit without communication, and calls the boxed kernel for everything else.
namespace tessera::detail {

struct SpecOf {
  C10_ALWAYS_INLINE const TensorSpec* operator()(const at::Tensor& t) const { return spec_or_null(t); }
};
using Reader = propagate::KeyReader<SpecOf>;

// True while autograd runs a node on this thread. There a view may communicate, because no user code has the alias, and
// plain tensors are allowed, because autograd formulas create them.
bool in_backward();

// While alive, in_backward() is false for the autograd node that runs now. Activation checkpointing recomputes a
// forward inside that node, and dispatch must decide as in the original forward. A backward inside the recomputed
// function counts as backward again.
class RecomputeScope {
 public:
  RecomputeScope();
  ~RecomputeScope();
  RecomputeScope(const RecomputeScope&) = delete;

 private:
  const void* before_;
};

void dispatch_boxed(const propagate::OpEntry& entry, torch::jit::Stack* stack);

struct BoxedOpKernel final : c10::OperatorKernel {
  explicit BoxedOpKernel(const propagate::OpEntry& entry) : entry(entry) {}
  void operator()(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack* stack) {
    dispatch_boxed(entry, stack);
  }
  const propagate::OpEntry& entry;
};

// The call in the form that the sharding rules take.
// Requires: at least one argument is a DTensor on `mesh`. Throws UsageError if another one is on a different mesh.
propagate::Call make_call(const propagate::OpEntry& entry, c10::ArrayRef<c10::IValue> args, MeshState* mesh);

// The decision for `key`. Uses `args` only if the cache has no decision yet.
propagate::Decision& choose(const propagate::OpEntry& entry, c10::ArrayRef<c10::IValue> args,
                            const propagate::Key& key);

C10_ALWAYS_INLINE bool spec_matches(const TensorSpec* spec, const at::Tensor& local) {
  return spec && spec->dtype == local.scalar_type() && spec->device == local.device() &&
         local.sizes() == c10::IntArrayRef(spec->local_sizes);
}

// The spec of the output `local`. A decision has no dtype and device for its outputs before the first run; this
// function completes and caches the spec. Throws InternalError if the rule predicts other local sizes.
const SpecRef& output_spec(const propagate::OpEntry& entry, propagate::Decision::Out& out, const at::Tensor& local,
                           const MeshState& mesh);

// True if the dispatcher is already below autograd and view tracking on this thread.
inline bool below_autograd() {
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return excluded.has(c10::DispatchKey::ADInplaceOrView) && excluded.has(c10::DispatchKey::AutogradCPU);
}

}  // namespace tessera::detail
