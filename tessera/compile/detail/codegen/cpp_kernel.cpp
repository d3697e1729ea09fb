#include "tessera/compile/detail/codegen/cpp_kernel.h"

#include "tessera/base/error.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

namespace tessera::compiler::codegen {
namespace {

constexpr int64_t kWorthAThread = 32768;  // elements, as of LibTorch's own loops

thread_local const Library* current = nullptr;

void cpp_kernel(at::TensorList outs, at::TensorList ins, std::string_view name) {
  TESSERA_CHECK(current, UsageError, "tessera::cpp_kernel(", name,
                ") is called outside of a program; generated functions belong to the program they were made for");
  std::vector<void*> operands;
  int64_t elements = 0;
  for (const auto& out : outs) {
    operands.push_back(out.mutable_data_ptr());
    elements += out.numel();
  }
  for (const auto& in : ins) operands.push_back(const_cast<void*>(in.const_data_ptr()));
  call(current->function(std::string(name)), operands.data(), elements);
}

TORCH_LIBRARY_FRAGMENT(tessera, m) { m.def("cpp_kernel(Tensor(a!)[] outs, Tensor[] ins, str name) -> ()"); }
TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("cpp_kernel", &cpp_kernel); }

}  // namespace

LibraryScope::LibraryScope(const Library* library) : before_(current) { current = library; }
LibraryScope::~LibraryScope() { current = before_; }

void call(Function function, void* const* operands, int64_t elements) {
  const auto parts = elements < 2 * kWorthAThread || at::in_parallel_region()
                         ? 1
                         : std::min<int64_t>(at::get_num_threads(), elements / kWorthAThread);
  if (parts == 1) return function(operands, 0, 1);
  at::parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (auto part = begin; part < end; part++) function(operands, part, parts);
  });
}

}  // namespace tessera::compiler::codegen
