#pragma once
#include "tessera/dtensor/detail/meta.h"
#include "tessera/dtensor/detail/observer.h"
#include "tessera/propagate/detail/choose.h"
#include "tessera/propagate/detail/decision.h"
#include "tessera/propagate/detail/key.h"
#include "tessera/propagate/detail/op_entry.h"

#include <ATen/core/stack.h>

// The life of an op on distributed tensors:
//
//   read       the arguments' specs and values become a key
//   choose     a remembered decision, or a new one from the rules
//   redistribute_inputs, run_local, wrap_outputs
//
// Every op has the boxed kernel below. About twenty hot ones have a typed kernel in front of it (typed_kernel.h) that
// goes straight through on a simple hit and hands over otherwise.
namespace tessera::detail {

struct SpecOf {
  C10_ALWAYS_INLINE const TensorSpec* operator()(const at::Tensor& t) const { return spec_or_null(t); }
};
using Reader = propagate::KeyReader<SpecOf>;

// Views may communicate inside backward, where nobody holds the alias; so may ops on tensors that autograd formulas
// make.
bool in_backward();

// While alive, the node that autograd is at on this thread does not count as backward: a checkpointed function is run
// again in there, and must decide as it did in forward. A backward inside of that function counts again.
class ForwardInBackward {
 public:
  ForwardInBackward();
  ~ForwardInBackward();
  ForwardInBackward(const ForwardInBackward&) = delete;

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

// A call as the rules see it. Requires: some argument is distributed over `mesh`. Throws UsageError for another mesh.
propagate::Call make_call(const propagate::OpEntry& entry, c10::ArrayRef<c10::IValue> args, MeshState* mesh);

// The decision for a key that was just read; `args` are looked at only on a miss.
propagate::Decision& choose(const propagate::OpEntry& entry, c10::ArrayRef<c10::IValue> args,
                            const propagate::Key& key);

// The spec of a result, once its dtype and device are seen.
C10_ALWAYS_INLINE bool matches(const TensorSpec* spec, const at::Tensor& local) {
  return spec && spec->dtype == local.scalar_type() && spec->device == local.device() &&
         local.sizes() == c10::IntArrayRef(spec->local_sizes);
}
const SpecRef& learn(const propagate::OpEntry& entry, propagate::Decision::Out& out, const at::Tensor& local,
                     const MeshState& mesh);

// Is the dispatcher already below autograd and view tracking on this thread?
inline bool below_autograd() {
  const auto excluded = c10::impl::tls_local_dispatch_key_set().excluded_;
  return excluded.has(c10::DispatchKey::ADInplaceOrView) && excluded.has(c10::DispatchKey::AutogradCPU);
}

}  // namespace tessera::detail
