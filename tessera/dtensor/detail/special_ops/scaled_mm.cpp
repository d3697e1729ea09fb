#include <ATen/core/Tensor.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

// Matrix products of local shards. ATen's CUDA kernels need sizes that are multiples of 16 or of 16 bytes, and local
// shards can have any size (rules/matmul.cpp). For other sizes these ops compute the same by other kernels.
namespace tessera {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// A scale (M, 1) of one local row looks like the scale of a tensor; CUDA kernels do not mix it with a scale (1, N).
bool kernel_takes(const at::Tensor& self, const at::Tensor& mat2, const at::Tensor& scale_a,
                  const at::Tensor& scale_b) {
  if (self.numel() == 0 || mat2.numel() == 0) return false;
  if (!self.is_cuda()) return true;
  return self.size(1) % 16 == 0 && mat2.size(1) % 16 == 0 && (scale_a.numel() == 1) == (scale_b.numel() == 1);
}

at::Tensor scaled_mm_local(const at::Tensor& self, const at::Tensor& mat2, const at::Tensor& scale_a,
                           const at::Tensor& scale_b, const OptionalTensor& bias, const OptionalTensor& scale_result,
                           std::optional<at::ScalarType> out_dtype, bool use_fast_accum) {
  if (kernel_takes(self, mat2, scale_a, scale_b)) {
    const auto columns = mat2.stride(0) == 1 ? mat2 : mat2.t().contiguous().t();  // column-major, as the kernels need
    return at::_scaled_mm(self.contiguous(), columns, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum);
  }
  auto result = at::matmul(self.to(at::kFloat).mul(scale_a), mat2.to(at::kFloat).mul(scale_b));
  if (bias && bias->defined()) result = result.add(*bias);
  if (scale_result && scale_result->defined()) result = result.mul(*scale_result);
  return result.to(out_dtype.value_or(self.scalar_type()));
}

bool is_aligned(const at::Tensor& t) {
  const auto bytes = static_cast<int64_t>(t.element_size());
  const auto last = t.stride(-1), before = t.stride(-2);
  return (last == 1 && before * bytes % 16 == 0) || (before == 1 && last * bytes % 16 == 0);
}

// Group by group. Reads `offs` on the host.
at::Tensor grouped_mm_by_group(const at::Tensor& self, const at::Tensor& mat2, const OptionalTensor& offs,
                               at::IntArrayRef out) {
  const bool rows = self.dim() == 2, columns = mat2.dim() == 2;
  auto result = at::zeros(out, self.options());
  const auto ends = offs && offs->defined() ? offs->to(at::kCPU, at::kLong) : at::Tensor();
  const int64_t groups = ends.defined() ? ends.numel() : self.size(0);
  int64_t begin = 0;
  for (int64_t g = 0; g < groups; g++) {
    const int64_t end = ends.defined() ? ends[g].item<int64_t>() : 0, count = end - begin;
    if (rows && columns)
      result[g].copy_(at::matmul(self.narrow(1, begin, count), mat2.narrow(0, begin, count)));
    else if (rows)
      result.narrow(0, begin, count).copy_(at::matmul(self.narrow(0, begin, count), mat2[g]));
    else if (columns)
      result.narrow(1, begin, count).copy_(at::matmul(self[g], mat2.narrow(1, begin, count)));
    else
      result[g].copy_(at::matmul(self[g], mat2[g]));
    begin = end;
  }
  return result;
}

at::Tensor grouped_mm_local(const at::Tensor& self, const at::Tensor& mat2, const OptionalTensor& offs,
                            const OptionalTensor& bias, std::optional<at::ScalarType> out_dtype, at::IntArrayRef out) {
  const auto dtype = out_dtype.value_or(self.scalar_type());
  if (self.numel() == 0 || mat2.numel() == 0) return at::zeros(out, self.options().dtype(dtype));
  if (is_aligned(self) && is_aligned(mat2) && out.back() * self.element_size() % 16 == 0)
    return at::_grouped_mm(self, mat2, offs, bias, out_dtype);
  return grouped_mm_by_group(self, mat2, offs, out).to(dtype);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def(
      "_scaled_mm_local(Tensor self, Tensor mat2, Tensor scale_a, Tensor scale_b, Tensor? bias, Tensor? scale_result, "
      "ScalarType? out_dtype, bool use_fast_accum) -> Tensor");
  m.def(
      "_grouped_mm_local(Tensor self, Tensor mat2, Tensor? offs, Tensor? bias, ScalarType? out_dtype, int[] out) -> "
      "Tensor");
}

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("_scaled_mm_local", scaled_mm_local);
  m.impl("_grouped_mm_local", grouped_mm_local);
}

}  // namespace tessera
