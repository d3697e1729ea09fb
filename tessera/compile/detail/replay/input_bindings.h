#pragma once
#include "tessera/compile/detail/api/guard_snapshot.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/trace/call_arguments.h"
#include "tessera/compile/detail/trace/tracer.h"

#include <optional>
#include <vector>

namespace tessera::compiler {

// Maps each input buffer of a program to the tensor that owns its memory: an argument of the call, the current gradient
// of a parameter, or a fixed tensor (a parameter, for example). Before a run it rebinds buffers whose memory has moved.
class InputBindings {
 public:
  InputBindings() = default;
  struct OldGradient {
    at::Tensor parameter, gradient;
  };
  // Call it directly after tracing. `gradients`: a buffer of one of these is bound, on each run, to the gradient that
  // the parameter has then.
  InputBindings(const Program& program, const Tracer::Result& traced, const CallArguments& arguments,
                const std::vector<OldGradient>& gradients = {});

  // Do the inputs share memory exactly as at tracing, arguments and others?
  // `unchanged`: the memory that add_to() has added is unchanged.
  bool fits(const CallArguments& arguments, bool unchanged = false) const;
  // Adds the memory that fits() reads of tensors that are not arguments. Call it if fits() is true.
  void add_to(GuardSnapshot& snapshot);
  // Does the program read an input by an offset from the begin of its storage?
  bool read_by_offset() const;
  // Rebinds buffers whose memory has moved. Bumps the version of every tensor that the program mutates.
  void bind(Executable& executable, const CallArguments& arguments);
  // The tensor that owns a buffer now; undefined if the buffer is not an input.
  at::Tensor tensor_of(int32_t buffer, const CallArguments& arguments) const;

 private:
  struct Binding {
    int32_t buffer;
    at::Tensor fixed;           // the owner is this tensor, or
    int argument = -1;          // the argument with this index, or
    at::Tensor parameter = {};  // the gradient of this parameter
    int64_t traced_offset = 0;  // storage offset of the owner at tracing
    const void* bound = nullptr;
    int64_t bound_offset = 0;
    bool written = false;
    // The program reads by an offset from the begin of the storage, which had this size at tracing.
    std::optional<int64_t> storage_bytes = {};
  };
  // Another tensor in the buffer of a binding: a parameter, a state, or the gradient of a parameter.
  struct SharedMemory {
    at::Tensor tensor;
    size_t binding;
    bool is_gradient;   // of `tensor`
    int64_t bytes = 0;  // from the first byte of the binding's owner to its own
  };
  void find_shared_memory(const CallArguments& arguments, const std::vector<OldGradient>& gradients);
  static const at::Tensor& owner(const Binding& each, const CallArguments& arguments);
  std::vector<Binding> bindings_;
  std::vector<SharedMemory> shared_;
  std::vector<const void*> fixed_storages_;           // of inputs that add_to() has added all; empty: it has not
  std::vector<std::pair<int, const void*>> aliased_;  // arguments that share their storage with another input
};

}  // namespace tessera::compiler
