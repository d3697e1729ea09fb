#pragma once
#include "tessera/compile/detail/trace/arguments.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/trace/tracer.h"

#include <vector>

namespace tessera::compiler {

// Whose memory the external buffers of a program are, and binding them anew where that has moved.
class Bindings {
 public:
  Bindings() = default;
  struct OldGradient {
    at::Tensor parameter, gradient;
  };
  // Right after tracing. Memory of an old gradient is that of whatever gradient its parameter has when the program
  // runs.
  Bindings(const Program& program, const Tracer::Result& traced, const Arguments& arguments,
           const std::vector<OldGradient>& gradients = {});

  // Does memory that was an argument's alone belong to one argument alone now, too?
  bool fits(const Arguments& arguments) const;
  // Binds what has moved; notes a write on every tensor that the program writes to.
  void bind(Executable& executable, const Arguments& arguments);
  // The tensor whose memory a buffer is now; undefined if it is not external.
  at::Tensor tensor_of(int32_t buffer, const Arguments& arguments) const;

 private:
  struct External {
    int32_t buffer;
    at::Tensor handle;          // whose memory it is ...
    int argument = -1;          // ... or the number of the argument that has it
    at::Tensor parameter = {};  // ... or whose gradient has it
    int64_t offset = 0;         // of that tensor when traced
    const void* bound = nullptr;
    int64_t bound_offset = 0;
    bool written = false;
  };
  static const at::Tensor& owner(const External& each, const Arguments& arguments);
  std::vector<External> externals_;
  std::vector<std::pair<int, const void*>> pinned_;  // arguments that are somebody's memory: only with that
};

}  // namespace tessera::compiler
