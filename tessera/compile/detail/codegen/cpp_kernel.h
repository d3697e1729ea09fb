#pragma once
#include "tessera/compile/detail/codegen/library.h"

// The op tessera::cpp_kernel(Tensor(a!)[] outs, Tensor[] ins, str name): calls a generated function. Two programs may
// each have a cpp_fused_div_0, so the name is looked up in the library of the program that runs.
namespace tessera::compiler::codegen {

// While alive, the library in which tessera::cpp_kernel looks on this thread.
class LibraryScope {
 public:
  explicit LibraryScope(const Library* library);
  ~LibraryScope();
  LibraryScope(const LibraryScope&) = delete;

 private:
  const Library* before_;
};

// On as many threads as `elements` are worth. Which thread computes an element does not change it.
void call(Function function, void* const* operands, int64_t elements);

}  // namespace tessera::compiler::codegen
