#include "tessera/compile/detail/codegen/cpp_kernel.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace tessera::compiler::codegen {
namespace {

constexpr int64_t kElementsPerThread = 32768;  // as at::internal::GRAIN_SIZE

thread_local const KernelLibrary* current_library = nullptr;

void run_cpp_kernel_with(at::TensorList outs, at::TensorList ins, std::string_view name, const double* numbers) {
  TESSERA_CHECK(current_library, UsageError, "tessera::cpp_kernel(", name,
                ") is called outside of a program; a generated kernel can only be called by its program");
  std::vector<void*> operands;
  int64_t elements = 0;
  for (const auto& out : outs) {
    operands.push_back(out.mutable_data_ptr());
    elements += out.numel();
  }
  for (const auto& in : ins) operands.push_back(const_cast<void*>(in.const_data_ptr()));
  operands.push_back(const_cast<double*>(numbers));
  call_kernel(current_library->function(std::string(name)), operands.data(), elements);
}

void run_cpp_kernel(at::TensorList outs, at::TensorList ins, std::string_view name) {
  run_cpp_kernel_with(outs, ins, name, nullptr);
}
void run_cpp_kernel_with_numbers(at::TensorList outs, at::TensorList ins, std::string_view name, double number0,
                                 double number1, double number2, double number3) {
  const double numbers[] = {number0, number1, number2, number3};
  run_cpp_kernel_with(outs, ins, name, numbers);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("cpp_kernel(Tensor(a!)[] outs, Tensor[] ins, str name) -> ()");
  m.def(
      "cpp_kernel.numbers(Tensor(a!)[] outs, Tensor[] ins, str name, float number0, float number1, float number2, "
      "float number3) -> ()");
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("cpp_kernel", &run_cpp_kernel);
  m.impl("cpp_kernel.numbers", &run_cpp_kernel_with_numbers);
}

}  // namespace

KernelLibraryScope::KernelLibraryScope(const KernelLibrary* library) : before_(current_library) {
  current_library = library;
}
KernelLibraryScope::~KernelLibraryScope() { current_library = before_; }

void call_kernel(KernelFunction function, void* const* operands, int64_t elements) {
  const auto parts = elements < 2 * kElementsPerThread || at::in_parallel_region()
                         ? 1
                         : std::min<int64_t>(at::get_num_threads(), elements / kElementsPerThread);
  if (parts == 1) return function(operands, 0, 1);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (auto part = begin; part < end; part++) function(operands, part, parts);
  });
}

}  // namespace tessera::compiler::codegen
