#pragma once
#include "tessera/compile/detail/codegen/kernel_library.h"

// The op tessera::cpp_kernel(Tensor(a!)[] outs, Tensor[] ins, str name) calls a generated kernel by name. Two programs
// can have kernels of the same name, so the name is looked up in the library of the program that runs. The overload
// `numbers` has four numbers more; the kernel gets their address after those of the tensors.
namespace tessera::compiler::codegen {

// While it is alive, tessera::cpp_kernel on this thread looks up names in `library`.
class KernelLibraryScope {
 public:
  explicit KernelLibraryScope(const KernelLibrary* library);
  ~KernelLibraryScope();
  KernelLibraryScope(const KernelLibraryScope&) = delete;

 private:
  const KernelLibrary* before_;
};

// Calls a kernel, with several threads if it has many elements. The result does not depend on the number of threads.
void call_kernel(KernelFunction function, void* const* operands, int64_t elements);

}  // namespace tessera::compiler::codegen
