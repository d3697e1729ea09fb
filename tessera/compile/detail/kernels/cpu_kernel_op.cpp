#include "tessera/compile/detail/kernels/cpu_kernel_op.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/bfloat16_product.h"
#include "tessera/compile/detail/codegen/tiled_product.h"

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
                           const codegen::TiledProductOptions& options);

template <MatrixProduct* product>
void run_matmul(const Call& call) {
  call.expect(1, call.ins.size() == 3 ? 3 : 2, 0);
  codegen::TiledProductOptions options;
  if (call.ins.size() == 3) options.bias = call.ins[2];
  product(call.outs[0], call.ins[0], call.ins[1], options);
}
template <MatrixProduct* product>
void run_matmul_gelu(const Call& call) {
  call.expect(2, 3, 1);
  product(call.outs[0], call.ins[0], call.ins[1],
          {.bias = call.ins[2],
           .epilogue = call.numbers[0] != 0 ? ProductEpilogue::GeluTanh : ProductEpilogue::Gelu,
           .result = call.outs[1]});
}
template <MatrixProduct* product>
void run_matmul_gelu_backward(const Call& call) {
  call.expect(1, 3, 1);
  product(call.outs[0], call.ins[0], call.ins[1],
          {.epilogue = call.numbers[0] != 0 ? ProductEpilogue::GeluTanhBackward : ProductEpilogue::GeluBackward,
           .operand = call.ins[2]});
}

void run_gelu(const Call& call) {
  call.expect(1, 1, 1);
  const auto count = call.outs[0].numel();
  auto *out = call.floats(call.outs[0], count), *x = call.floats(call.ins[0], count);
  parallel_for(0, count, kElementsPerTask, [&](int64_t begin, int64_t end) {
    cpu_kernels().gelu(x + begin, out + begin, end - begin, call.numbers[0] != 0);
  });
}
void run_gelu_backward(const Call& call) {
  call.expect(1, 2, 1);
  const auto count = call.outs[0].numel();
  auto *out = call.floats(call.outs[0], count), *gradient = call.floats(call.ins[0], count),
       *x = call.floats(call.ins[1], count);
  parallel_for(0, count, kElementsPerTask, [&](int64_t begin, int64_t end) {
    cpu_kernels().gelu_backward(gradient + begin, x + begin, out + begin, end - begin, call.numbers[0] != 0);
  });
}

int64_t rows_per_task(int64_t columns) {
  return std::max<int64_t>(kElementsPerTask / std::max<int64_t>(columns, 1), 1);
}

void run_layer_norm(const Call& call) {
  call.expect(3, 3, 1);
  const auto &x = call.ins[0], &weight = call.ins[1];
  const auto columns = weight.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  const LayerNormRows arguments{columns,
                                call.floats(x, rows * columns),
                                call.floats(weight, columns),
                                call.floats(call.ins[2], columns),
                                call.floats(call.outs[0], rows * columns),
                                call.floats(call.outs[1], rows),
                                call.floats(call.outs[2], rows),
                                static_cast<float>(call.numbers[0])};
  parallel_for(0, rows, rows_per_task(columns),
               [&](int64_t begin, int64_t end) { cpu_kernels().layer_norm(arguments, begin, end); });
}

// Each block of rows has its own sums for the weight and the bias, which are added in the order of the blocks.
void run_layer_norm_backward_into(const Call& call, bool adds) {
  call.expect(3, 5, 0);
  const auto &x = call.ins[1], &weight = call.ins[4];
  const auto columns = weight.numel(), rows = columns == 0 ? 0 : x.numel() / columns;
  const LayerNormGradients arguments{columns,
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
      cpu_kernels().layer_norm_backward(arguments, block * kRowsPerSum, std::min((block + 1) * kRowsPerSum, rows), sum,
                                        sum + columns);
    }
  });
  cpu_kernels().sum_rows(sums.floats(), blocks, 2 * columns, dweight, 0, columns);
  cpu_kernels().sum_rows(sums.floats() + columns, blocks, 2 * columns, dbias, 0, columns);
}
void run_layer_norm_backward(const Call& call) { run_layer_norm_backward_into(call, false); }
void run_layer_norm_backward_add(const Call& call) { run_layer_norm_backward_into(call, true); }

void run_sum_rows(const Call& call) {
  call.expect(1, 1, 0);
  const auto columns = call.outs[0].numel(), rows = columns == 0 ? 0 : call.ins[0].numel() / columns;
  auto *x = call.floats(call.ins[0], rows * columns), *out = call.floats(call.outs[0], columns);
  constexpr int64_t kColumnsPerTask = 64;
  parallel_for(0, (columns + kColumnsPerTask - 1) / kColumnsPerTask,
               std::max<int64_t>(kElementsPerTask / (std::max<int64_t>(rows, 1) * kColumnsPerTask), 1),
               [&](int64_t begin, int64_t end) {
                 cpu_kernels().sum_rows(x, rows, columns, out, begin * kColumnsPerTask,
                                        std::min(end * kColumnsPerTask, columns));
               });
}

// (batch, heads, length, dim), with unit stride in the last dim.
struct HeadsInMemory {
  float* data;
  int64_t batch_stride, head_stride, row;

  StridedMatrix<float> head(int64_t heads, int64_t index) const {
    return {data + index / heads * batch_stride + index % heads * head_stride, row, 1};
  }
  StridedMatrix<const float> read_head(int64_t heads, int64_t index) const {
    const auto matrix = head(heads, index);
    return {matrix.data, matrix.row, 1};
  }
};
HeadsInMemory heads_of(const Call& call, const at::Tensor& t, const at::Tensor& like, int64_t length) {
  call.check(t.defined() && t.is_cpu() && t.scalar_type() == at::kFloat && t.dim() == 4 && like.dim() == 4 &&
                 t.size(0) == like.size(0) && t.size(1) == like.size(1) && t.size(2) == length &&
                 t.size(3) == like.size(3) && (t.stride(3) == 1 || t.size(3) <= 1),
             "a tensor has another type, size or layout");
  return {const_cast<float*>(t.const_data_ptr<float>()), t.stride(0), t.stride(1), t.stride(2)};
}

struct AttentionTensors {
  int64_t heads, count, queries, keys, dim;  // heads: per item of the batch; count: in all
  HeadsInMemory query, key, value, out;
  float* logsumexp;
  int64_t logsumexp_strides[3];
  float scale;
  bool causal;

  AttentionTensors(const Call& call, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& o,
                   const at::Tensor& lse) {
    call.check(q.dim() == 4 && k.dim() == 4 && k.size(2) > 0, "query and key must have four dims");
    heads = q.size(1), count = q.size(0) * heads, queries = q.size(2), keys = k.size(2), dim = q.size(3);
    query = heads_of(call, q, q, queries), key = heads_of(call, k, q, keys), value = heads_of(call, v, q, keys);
    out = heads_of(call, o, q, queries);
    call.check(lse.dim() == 3 && lse.is_cpu() && lse.scalar_type() == at::kFloat && lse.size(0) == q.size(0) &&
                   lse.size(1) == heads && lse.size(2) == queries,
               "logsumexp has another type or size");
    logsumexp = const_cast<float*>(lse.const_data_ptr<float>());
    for (int d = 0; d < 3; d++) logsumexp_strides[d] = lse.stride(d);
    causal = call.numbers[0] != 0, scale = static_cast<float>(call.numbers[1]);
  }
  AttentionHead head(int64_t i) const {
    return {queries,
            keys,
            dim,
            query.read_head(heads, i),
            key.read_head(heads, i),
            value.read_head(heads, i),
            out.head(heads, i),
            logsumexp + i / heads * logsumexp_strides[0] + i % heads * logsumexp_strides[1],
            logsumexp_strides[2],
            scale,
            causal};
  }
  int64_t scratch_floats() const { return cpu_kernels().queries * (keys + cpu_kernels().product_columns); }
};

void run_attention(const Call& call) {
  call.expect(2, 3, 2);
  const AttentionTensors all(call, call.ins[0], call.ins[1], call.ins[2], call.outs[0], call.outs[1]);
  const auto block = cpu_kernels().queries, blocks = (all.queries + block - 1) / block;
  parallel_for(0, all.count * blocks, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(all.scratch_floats());
    for (auto task = begin; task < end; task++)
      cpu_kernels().attention(all.head(task / blocks), task % blocks * block,
                              std::min((task % blocks + 1) * block, all.queries), scratch.floats());
  });
}

void run_attention_backward(const Call& call) {
  call.expect(3, 6, 2);
  const AttentionTensors all(call, call.ins[1], call.ins[2], call.ins[3], call.ins[4], call.ins[5]);
  const auto& q = call.ins[1];
  const auto gradient = heads_of(call, call.ins[0], q, all.queries),
             dquery = heads_of(call, call.outs[0], q, all.queries), dkey = heads_of(call, call.outs[1], q, all.keys),
             dvalue = heads_of(call, call.outs[2], q, all.keys);
  parallel_for(0, all.count, 1, [&](int64_t begin, int64_t end) {
    const Scratch scratch(2 * all.scratch_floats());
    for (auto i = begin; i < end; i++)
      cpu_kernels().attention_backward(all.head(i),
                                       {gradient.read_head(all.heads, i), dquery.head(all.heads, i),
                                        dkey.head(all.heads, i), dvalue.head(all.heads, i)},
                                       scratch.floats());
  });
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
      all.logsumexp[i] = cpu_kernels().log_sum_exp(all.logits + i * all.classes, all.classes);
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
      cpu_kernels().scaled_exponential(all.logits + i * all.classes, row, all.classes, all.logsumexp[i], factor);
      row[all.target[i]] -= factor;
    }
  });
}

constexpr struct {
  const char* name;
  void (*run)(const Call& call);
} kCpuKernels[] = {
    {"matmul", run_matmul<codegen::tiled_product>},
    {"matmul_gelu", run_matmul_gelu<codegen::tiled_product>},
    {"matmul_gelu_backward", run_matmul_gelu_backward<codegen::tiled_product>},
    {"matmul_bf16", run_matmul<codegen::bfloat16_product>},
    {"matmul_gelu_bf16", run_matmul_gelu<codegen::bfloat16_product>},
    {"matmul_gelu_backward_bf16", run_matmul_gelu_backward<codegen::bfloat16_product>},
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
