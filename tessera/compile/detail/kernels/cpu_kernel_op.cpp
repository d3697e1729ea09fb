#include "tessera/compile/detail/kernels/cpu_kernel_op.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/numerics/detail/vector/bfloat16_product.h"
#include "tessera/numerics/detail/vector/vector_ops.h"

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace tessera::compiler {
namespace {

constexpr int64_t kElementsPerTask = 16384;
constexpr int64_t kRowsPerSum = 32;  // sums over rows are in blocks of this many rows, for any number of threads

// The arguments of one call. They come from a program, which may have been parsed from text: everything is checked.
struct KernelCallArguments {
  at::TensorList outs, ins;
  c10::ArrayRef<double> numbers;
  std::string_view name;

  void check(bool fits, const char* what) const {
    TESSERA_CHECK(fits, UsageError, "tessera::cpu_kernel: ", name, ": ", what);
  }
  void expect(size_t out_count, size_t in_count, size_t number_count) const {
    check(outs.size() == out_count && ins.size() == in_count && numbers.size() == number_count,
          "wrong number of arguments");
  }
  // The elements of a contiguous tensor.
  float* floats(const at::Tensor& t, int64_t count) const {
    check(t.defined() && t.is_cpu() && t.scalar_type() == at::kFloat && t.is_contiguous() && t.numel() == count,
          "a tensor has another type, size or layout");
    return const_cast<float*>(t.const_data_ptr<float>());
  }
};
using Call = KernelCallArguments;

class Scratch {
 public:
  explicit Scratch(int64_t count)
      : memory_(c10::GetCPUAllocator()->allocate(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(float))) {}
  float* floats() const { return static_cast<float*>(memory_.get()); }

 private:
  c10::DataPtr memory_;
};

using MatrixProduct = void(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                           const numerics::TiledProductOptions& options);

template <MatrixProduct* product>
void run_matmul(const Call& call) {
  call.expect(1, call.ins.size() == 3 ? 3 : 2, 0);
  numerics::TiledProductOptions options;
  if (call.ins.size() == 3) options.bias = call.ins[2];
  product(call.outs[0], call.ins[0], call.ins[1], options);
}
template <MatrixProduct* product>
void run_matmul_gelu(const Call& call) {
  call.expect(2, 3, 1);
  product(call.outs[0], call.ins[0], call.ins[1],
          {.bias = call.ins[2],
           .epilogue = call.numbers[0] != 0 ? numerics::ProductEpilogue::GeluTanh : numerics::ProductEpilogue::Gelu,
           .result = call.outs[1]});
}
template <MatrixProduct* product>
void run_matmul_gelu_backward(const Call& call) {
  call.expect(1, 3, 1);
  product(call.outs[0], call.ins[0], call.ins[1],
          {.epilogue = call.numbers[0] != 0 ? numerics::ProductEpilogue::GeluTanhBackward
                                            : numerics::ProductEpilogue::GeluBackward,
           .operand = call.ins[2]});
}

void run_gelu(const Call& call) {
  call.expect(1, 1, 1);
  numerics::vector_gelu(call.outs[0], call.ins[0], call.numbers[0] != 0);
}
void run_gelu_backward(const Call& call) {
  call.expect(1, 2, 1);
  numerics::vector_gelu_backward(call.outs[0], call.ins[0], call.ins[1], call.numbers[0] != 0);
}

int64_t rows_per_task(int64_t columns) {
  return std::max<int64_t>(kElementsPerTask / std::max<int64_t>(columns, 1), 1);
}

void run_layer_norm(const Call& call) {
  call.expect(3, 3, 1);
  numerics::vector_norm(call.outs[0], call.outs[1], call.outs[2], call.ins[0], call.ins[1], call.ins[2],
                        call.numbers[0]);
}

// Blocks of 128 rows, one after the other, so that errors do not grow with the number of rows.
std::vector<numerics::SumStep> blocks_of_rows(int64_t rows) {
  std::vector<numerics::SumStep> steps;
  for (int64_t begin = 0; begin == 0 || begin < rows; begin += 128) {
    const auto end = std::min<int64_t>(begin + 128, rows);
    steps.push_back({begin, end, begin > 0, end == rows ? 0 : -1});
  }
  return steps;
}

// Each block of rows has its own sums for the weight and the bias, which are added in the order of the blocks.
void run_layer_norm_backward_into(const Call& call, bool adds) {
  call.expect(3, 5, 0);
  const auto &x = call.ins[1], &weight = call.ins[4];
  const auto columns = weight.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  const numerics::LayerNormGradients arguments{columns,
                                               call.floats(call.ins[0], rows * columns),
                                               call.floats(x, rows * columns),
                                               call.floats(call.ins[2], rows),
                                               call.floats(call.ins[3], rows),
                                               call.floats(weight, columns),
                                               call.floats(call.outs[0], rows * columns),
                                               adds};
  auto *dweight = call.floats(call.outs[1], columns), *dbias = call.floats(call.outs[2], columns);
  const auto blocks = (rows + kRowsPerSum - 1) / kRowsPerSum;
  const Scratch sums(2 * blocks * columns);
  parallel_for(0, blocks, std::max<int64_t>(rows_per_task(columns) / kRowsPerSum, 1), [&](int64_t begin, int64_t end) {
    for (auto block = begin; block < end; block++) {
      auto* sum = sums.floats() + 2 * block * columns;
      std::fill_n(sum, 2 * columns, 0.0F);
      numerics::cpu_kernels().layer_norm_backward(arguments, block * kRowsPerSum,
                                                  std::min((block + 1) * kRowsPerSum, rows), sum, sum + columns);
    }
  });
  const auto steps = blocks_of_rows(blocks);
  numerics::sum_in_parallel<float>({sums.floats(), 2 * columns, columns, dweight, 0, nullptr}, steps);
  numerics::sum_in_parallel<float>({sums.floats() + columns, 2 * columns, columns, dbias, 0, nullptr}, steps);
}
void run_layer_norm_backward(const Call& call) { run_layer_norm_backward_into(call, false); }
void run_layer_norm_backward_add(const Call& call) { run_layer_norm_backward_into(call, true); }

void run_sum_rows(const Call& call) {
  call.expect(1, 1, 0);
  const auto columns = call.outs[0].numel(), rows = columns == 0 ? 0 : call.ins[0].numel() / columns;
  auto *x = call.floats(call.ins[0], rows * columns), *out = call.floats(call.outs[0], columns);
  numerics::sum_in_parallel<float>({x, columns, columns, out, 0, nullptr}, blocks_of_rows(rows));
}

numerics::AttentionOptions attention_options(const Call& call) { return {call.numbers[0] != 0, call.numbers[1]}; }

void run_attention(const Call& call) {
  call.expect(2, 3, 2);
  numerics::vector_attention(call.outs[0], call.outs[1], call.ins[0], call.ins[1], call.ins[2],
                             attention_options(call));
}
void run_attention_backward(const Call& call) {
  call.expect(3, 6, 2);
  const auto& in = call.ins;
  numerics::vector_attention_backward(call.outs[0], call.outs[1], call.outs[2],
                                      {in[0], in[1], in[2], in[3], in[4], in[5]}, attention_options(call));
}

// Logits (rows, classes) and their targets.
struct Classification {
  int64_t rows, classes;
  float *logits, *logsumexp;
  const int64_t* target;
  int64_t ignored, counted = 0;  // counted: rows whose target is not ignored
  bool mean;

  Classification(const Call& call, const at::Tensor& logits_in, const at::Tensor& target_in, const at::Tensor& lse)
      : rows(target_in.numel()), classes(rows == 0 ? 0 : logits_in.numel() / rows) {
    logits = call.floats(logits_in, rows * classes), logsumexp = call.floats(lse, rows);
    call.check(target_in.is_cpu() && target_in.scalar_type() == at::kLong && target_in.is_contiguous() && classes > 0,
               "targets must be int64 and contiguous");
    target = target_in.const_data_ptr<int64_t>();
    const auto reduction = static_cast<int64_t>(call.numbers[0]);
    call.check(reduction == at::Reduction::Mean || reduction == at::Reduction::Sum,
               "the reduction must be mean or sum");
    mean = reduction == at::Reduction::Mean, ignored = static_cast<int64_t>(call.numbers[1]);
    for (int64_t i = 0; i < rows; i++) {
      if (target[i] == ignored) continue;
      TORCH_CHECK_INDEX(target[i] >= 0 && target[i] < classes, "Target ", target[i], " is out of bounds.");
      counted++;
    }
  }
  // Of the mean, which is NaN if no row counts.
  double divisor() const {
    return mean ? (counted > 0 ? static_cast<double>(counted) : std::numeric_limits<double>::quiet_NaN()) : 1;
  }
};

void run_cross_entropy(const Call& call) {
  call.expect(2, 2, 2);
  const Classification all(call, call.ins[0], call.ins[1], call.outs[1]);
  parallel_for(0, all.rows, rows_per_task(all.classes), [&](int64_t begin, int64_t end) {
    for (auto i = begin; i < end; i++)
      all.logsumexp[i] = numerics::cpu_kernels().log_sum_exp(all.logits + i * all.classes, all.classes);
  });
  double sum = 0;
  for (int64_t i = 0; i < all.rows; i++)
    if (all.target[i] != all.ignored) sum += all.logsumexp[i] - all.logits[i * all.classes + all.target[i]];
  *call.floats(call.outs[0], 1) = static_cast<float>(sum / all.divisor());
}

// grad_logits may be the logits.
void run_cross_entropy_backward(const Call& call) {
  call.expect(1, 4, 2);
  const Classification all(call, call.ins[1], call.ins[2], call.ins[3]);
  auto* out = call.floats(call.outs[0], all.rows * all.classes);
  const auto factor = static_cast<float>(*call.floats(call.ins[0], 1) / all.divisor());
  parallel_for(0, all.rows, rows_per_task(all.classes), [&](int64_t begin, int64_t end) {
    for (auto i = begin; i < end; i++) {
      auto* row = out + i * all.classes;
      if (all.target[i] == all.ignored) {
        std::fill_n(row, all.classes, 0.0F);
        continue;
      }
      numerics::cpu_kernels().scaled_exponential(all.logits + i * all.classes, row, all.classes, all.logsumexp[i],
                                                 factor);
      row[all.target[i]] -= factor;
    }
  });
}

constexpr struct {
  const char* name;
  void (*run)(const Call& call);
} kCpuKernels[] = {
    {"matmul", run_matmul<numerics::tiled_product>},
    {"matmul_gelu", run_matmul_gelu<numerics::tiled_product>},
    {"matmul_gelu_backward", run_matmul_gelu_backward<numerics::tiled_product>},
    {"matmul_bf16", run_matmul<numerics::bfloat16_product>},
    {"matmul_gelu_bf16", run_matmul_gelu<numerics::bfloat16_product>},
    {"matmul_gelu_backward_bf16", run_matmul_gelu_backward<numerics::bfloat16_product>},
    {"gelu", run_gelu},
    {"gelu_backward", run_gelu_backward},
    {"layer_norm", run_layer_norm},
    {"layer_norm_backward", run_layer_norm_backward},
    {"layer_norm_backward_add", run_layer_norm_backward_add},
    {"sum_rows", run_sum_rows},
    {"attention", run_attention},
    {"attention_backward", run_attention_backward},
    {"cross_entropy", run_cross_entropy},
    {"cross_entropy_backward", run_cross_entropy_backward},
};

void run_cpu_kernel(at::TensorList outs, at::TensorList ins, c10::ArrayRef<double> numbers, std::string_view name) {
  for (const auto& kernel : kCpuKernels)
    if (name == kernel.name) return kernel.run({outs, ins, numbers, name});
  TESSERA_FAIL(UsageError, "tessera::cpu_kernel: unknown kernel \"", name, "\"; there are ",
               c10::Join(", ", cpu_kernel_names()));
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  m.def("cpu_kernel(Tensor(a!)[] outs, Tensor[] ins, float[] numbers, str name) -> ()");
}
TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("cpu_kernel", run_cpu_kernel); }

}  // namespace

std::vector<std::string> cpu_kernel_names() {
  std::vector<std::string> names;
  for (const auto& kernel : kCpuKernels) names.emplace_back(kernel.name);
  return names;
}

}  // namespace tessera::compiler
