#include "tessera/numerics/detail/vector/bfloat16_product.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>

namespace tessera::numerics {
namespace {

Bfloat16Operand operand_of(const at::Tensor& t, const char* name) {
  const bool is_matrix = t.defined() && t.dim() == 2 && t.is_cpu() && !t.is_neg() &&
                         (t.scalar_type() == at::kFloat || t.scalar_type() == at::kBFloat16);
  const auto rows = is_matrix ? t.size(0) : 0, columns = is_matrix ? t.size(1) : 0;
  const bool by_rows = is_matrix && (t.stride(1) == 1 || columns <= 1) && (t.stride(0) >= columns || rows <= 1);
  const bool by_columns = is_matrix && (t.stride(0) == 1 || rows <= 1) && (t.stride(1) >= rows || columns <= 1);
  TESSERA_CHECK(by_rows || by_columns, UsageError, "bfloat16_product: ", name,
                " must be a float32 or bfloat16 matrix on the CPU with unit stride in one dim");
  return {t.const_data_ptr(), by_rows ? std::max(t.stride(0), columns) : 1, by_rows ? 1 : std::max(t.stride(1), rows),
          t.scalar_type() == at::kFloat};
}

// A float32 tensor without gaps, with the elements of `out`.
StridedMatrix<float> like_float_out(const at::Tensor& t, const at::Tensor& out, const char* name) {
  TESSERA_CHECK(t.defined() && t.is_contiguous() && t.numel() == out.numel() && t.scalar_type() == at::kFloat &&
                    t.is_cpu() && !t.is_neg(),
                UsageError, "bfloat16_product: ", name, " must be a contiguous float32 tensor of ", out.numel(),
                " elements on the CPU");
  return {const_cast<float*>(t.const_data_ptr<float>()), out.size(1), 1};
}

// Each thread copies all of one operand: of the smaller one, so the larger one is divided.
void multiply_pairs_in_parallel(const Bfloat16Product& product) {
  const auto& kernels = cpu_kernels();
  const auto by_rows = product.m >= product.n;
  constexpr int64_t kRowsPerTask = 8;
  const auto per_task = by_rows ? kRowsPerTask : kernels.product_columns, all = by_rows ? product.m : product.n,
             tasks = (all + per_task - 1) / per_task, threads = std::min<int64_t>(at::get_num_threads(), tasks);
  parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    const auto scratch =
        c10::GetCPUAllocator()->allocate(static_cast<size_t>(kernels.bfloat16_scratch) * sizeof(float));
    for (auto part = begin; part < end; part++) {
      const auto first = tasks * part / threads * per_task,
                 last = std::min(tasks * (part + 1) / threads * per_task, all);
      if (by_rows)
        kernels.multiply_bfloat16(product, first, last, 0, product.n, static_cast<float*>(scratch.get()));
      else
        kernels.multiply_bfloat16(product, 0, product.m, first, last, static_cast<float*>(scratch.get()));
    }
  });
}

}  // namespace

void bfloat16_product(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                      const TiledProductOptions& options) {
  TESSERA_CHECK(cpu_kernels().multiply_bfloat16, UsageError,
                "bfloat16_product: this processor has no instructions for bfloat16 (AVX-512 BF16)");
  const auto left = operand_of(a, "a"), right = operand_of(b, "b");
  TESSERA_CHECK(
      out.defined() && out.dim() == 2 && a.size(1) == b.size(0) && out.size(0) == a.size(0) && out.size(1) == b.size(1),
      UsageError, "bfloat16_product: a is ", a.sizes(), ", b is ", b.sizes(), ", out is ",
      out.defined() ? c10::str(out.sizes()) : "undefined", "; write a (m, k), b (k, n), out (m, n)");
  Bfloat16Product product{out.size(0), out.size(1), a.size(1), left, right, like_float_out(out, out, "out")};
  if (options.bias && options.bias->defined()) {
    const auto& bias = *options.bias;
    TESSERA_CHECK(bias.dim() == 1 && bias.size(0) == b.size(1) && bias.is_contiguous() &&
                      bias.scalar_type() == at::kFloat && bias.is_cpu(),
                  UsageError, "bfloat16_product: the bias must be a contiguous float32 vector of ", b.size(1),
                  " elements on the CPU");
    product.bias = bias.const_data_ptr<float>();
  }
  product.epilogue = options.epilogue;
  if (options.operand.defined()) {
    const auto operand = like_float_out(options.operand, out, "the operand");
    product.operand = {operand.data, operand.row, 1};
  }
  if (options.result.defined()) product.result = like_float_out(options.result, out, "the result");
  const bool backward =
      options.epilogue == ProductEpilogue::GeluBackward || options.epilogue == ProductEpilogue::GeluTanhBackward;
  TESSERA_CHECK(options.epilogue == ProductEpilogue::None || (backward ? options.operand : options.result).defined(),
                UsageError, "bfloat16_product: the epilogue needs another tensor");
  if (out.numel() > 0) multiply_pairs_in_parallel(product);
}

}  // namespace tessera::numerics
