#include "tessera/numerics/detail/vector/vector_ops.h"

#include "tessera/base/detail/parallel.h"
#include "tessera/base/error.h"
#include "tessera/numerics/detail/sum_tree.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <memory>
#include <type_traits>

namespace tessera::numerics {
namespace {

constexpr int64_t kElementsPerTask = 16384;

int64_t rows_per_task(int64_t columns) {
  return std::max<int64_t>(kElementsPerTask / std::max<int64_t>(columns, 1), 1);
}

float* floats_or_null(const std::optional<at::Tensor>& t, int64_t count, const char* op) {
  return t && t->defined() && t->numel() > 0 ? contiguous_floats(*t, count, op) : nullptr;
}

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
HeadsInMemory heads_of(const at::Tensor& t, const at::Tensor& like, int64_t length) {
  TESSERA_CHECK(t.defined() && t.is_cpu() && t.scalar_type() == at::kFloat && !t.is_neg() && t.dim() == 4 &&
                    like.dim() == 4 && t.size(0) == like.size(0) && t.size(1) == like.size(1) && t.size(2) == length &&
                    t.size(3) == like.size(3) && (t.stride(3) == 1 || t.size(3) <= 1),
                UsageError, "attention: a tensor has another type, size or layout");
  return {const_cast<float*>(t.const_data_ptr<float>()), t.stride(0), t.stride(1), t.stride(2)};
}

struct AttentionTensors {
  int64_t heads, count, queries, keys, dim;  // heads: per item of the batch; count: in all
  HeadsInMemory query, key, value, out;
  float* logsumexp;
  int64_t logsumexp_strides[3];
  AttentionOptions options;

  AttentionTensors(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& o,
                   const at::Tensor& lse, const AttentionOptions& options)
      : options(options) {
    TESSERA_CHECK(q.dim() == 4 && k.dim() == 4 && k.size(2) > 0, UsageError,
                  "attention: query and key must have four dims");
    heads = q.size(1), count = q.size(0) * heads, queries = q.size(2), keys = k.size(2), dim = q.size(3);
    query = heads_of(q, q, queries), key = heads_of(k, q, keys), value = heads_of(v, q, keys);
    out = heads_of(o, q, queries);
    TESSERA_CHECK(lse.dim() == 3 && lse.is_cpu() && lse.scalar_type() == at::kFloat && lse.size(0) == q.size(0) &&
                      lse.size(1) == heads && lse.size(2) == queries,
                  UsageError, "attention: logsumexp has another type or size");
    logsumexp = const_cast<float*>(lse.const_data_ptr<float>());
    for (int d = 0; d < 3; d++) logsumexp_strides[d] = lse.stride(d);
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
            static_cast<float>(options.scale),
            options.causal};
  }
  std::unique_ptr<float[]> scratch(int64_t times) const {
    const auto count = times * cpu_kernels().queries * (keys + cpu_kernels().product_columns);
    return std::make_unique_for_overwrite<float[]>(static_cast<size_t>(count));
  }
};

}  // namespace

float* contiguous_floats(const at::Tensor& t, int64_t count, const char* op) {
  TESSERA_CHECK(t.defined() && t.is_cpu() && t.scalar_type() == at::kFloat && !t.is_neg() && t.is_contiguous() &&
                    t.numel() == count,
                UsageError, op, ": a tensor has another type, size or layout");
  return const_cast<float*>(t.const_data_ptr<float>());
}

void vector_gelu(const at::Tensor& out, const at::Tensor& x, bool tanh) {
  const auto count = out.numel();
  auto *to = contiguous_floats(out, count, "gelu"), *from = contiguous_floats(x, count, "gelu");
  parallel_for(0, count, kElementsPerTask,
               [&](int64_t begin, int64_t end) { cpu_kernels().gelu(from + begin, to + begin, end - begin, tanh); });
}

void vector_gelu_backward(const at::Tensor& out, const at::Tensor& gradient, const at::Tensor& x, bool tanh) {
  const auto count = out.numel();
  auto *to = contiguous_floats(out, count, "gelu_backward"), *g = contiguous_floats(gradient, count, "gelu_backward"),
       *from = contiguous_floats(x, count, "gelu_backward");
  parallel_for(0, count, kElementsPerTask, [&](int64_t begin, int64_t end) {
    cpu_kernels().gelu_backward(g + begin, from + begin, to + begin, end - begin, tanh);
  });
}

void vector_norm(const at::Tensor& y, const at::Tensor& mean, const at::Tensor& rstd, const at::Tensor& x,
                 const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, double eps) {
  constexpr const char* kOp = "norm";
  if (x.numel() == 0) return;
  const int64_t rows = rstd.numel(), columns = x.numel() / std::max<int64_t>(rows, 1);
  const LayerNormRows arguments{columns,
                                contiguous_floats(x, rows * columns, kOp),
                                floats_or_null(weight, columns, kOp),
                                floats_or_null(bias, columns, kOp),
                                contiguous_floats(y, rows * columns, kOp),
                                floats_or_null(mean, rows, kOp),
                                contiguous_floats(rstd, rows, kOp),
                                static_cast<float>(eps)};
  parallel_for(0, rows, rows_per_task(columns),
               [&](int64_t begin, int64_t end) { cpu_kernels().layer_norm(arguments, begin, end); });
}

void vector_norm_backward(const at::Tensor& dx, const at::Tensor& products, const at::Tensor& dy, const at::Tensor& x,
                          const at::Tensor& mean, const at::Tensor& rstd, const std::optional<at::Tensor>& weight) {
  constexpr const char* kOp = "norm_backward";
  if (x.numel() == 0) return;
  const int64_t rows = rstd.numel(), columns = x.numel() / std::max<int64_t>(rows, 1);
  const LayerNormGradients arguments{columns,
                                     contiguous_floats(dy, rows * columns, kOp),
                                     contiguous_floats(x, rows * columns, kOp),
                                     floats_or_null(mean, rows, kOp),
                                     contiguous_floats(rstd, rows, kOp),
                                     floats_or_null(weight, columns, kOp),
                                     floats_or_null(dx, rows * columns, kOp),
                                     false,
                                     floats_or_null(products, rows * columns, kOp)};
  parallel_for(0, rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
    cpu_kernels().layer_norm_backward(arguments, begin, end, nullptr, nullptr);
  });
}

template <class T>
void sum_in_parallel(const SummedRows<T>& rows, const std::vector<SumStep>& steps, const MatrixStack& matrices) {
  constexpr int64_t kUnit = 128, kMostColumns = 1024;  // of a task: their part of the stack stays in the cache
  const int64_t tasks = (at::get_num_threads() + matrices.count - 1) / matrices.count;  // per matrix, at least
  const int64_t shared = (rows.columns + tasks * kUnit - 1) / (tasks * kUnit) * kUnit;
  const int64_t width = std::clamp(shared, kUnit, kMostColumns), chunks = (rows.columns + width - 1) / width;
  const int64_t terms = steps.empty() ? 0 : steps.back().end, step_count = static_cast<int64_t>(steps.size());
  parallel_for(0, matrices.count * chunks, rows_per_task(terms * std::min(rows.columns, width)),
               [&](int64_t begin, int64_t end) {
                 std::vector<T> stack(static_cast<size_t>(stack_depth(steps) * width));
                 for (int64_t i = begin; i < end; i++) {
                   auto part = rows;
                   const int64_t column = i % chunks * width;
                   part.x += i / chunks * matrices.x_stride + column;
                   part.out += i / chunks * matrices.out_stride + column;
                   part.columns = std::min(width, rows.columns - column);
                   part.stack = stack.data();
                   if constexpr (std::is_same_v<T, float>)
                     cpu_kernels().sum_tree(part, steps.data(), step_count);
                   else
                     cpu_kernels().sum_tree_doubles(part, steps.data(), step_count);
                 }
               });
}
template void sum_in_parallel(const SummedRows<float>&, const std::vector<SumStep>&, const MatrixStack&);
template void sum_in_parallel(const SummedRows<double>&, const std::vector<SumStep>&, const MatrixStack&);

void vector_attention(const at::Tensor& out, const at::Tensor& logsumexp, const at::Tensor& query,
                      const at::Tensor& key, const at::Tensor& value, const AttentionOptions& options) {
  const AttentionTensors all(query, key, value, out, logsumexp, options);
  const auto block = cpu_kernels().queries, blocks = (all.queries + block - 1) / block;
  parallel_for(0, all.count * blocks, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = all.scratch(1);
    for (auto task = begin; task < end; task++)
      cpu_kernels().attention(all.head(task / blocks), task % blocks * block,
                              std::min((task % blocks + 1) * block, all.queries), scratch.get());
  });
}

void vector_attention_backward(const at::Tensor& dquery, const at::Tensor& dkey, const at::Tensor& dvalue,
                               const AttentionInputs& in, const AttentionOptions& options) {
  const AttentionTensors all(in.query, in.key, in.value, in.out, in.logsumexp, options);
  const auto gradient = heads_of(in.gradient, in.query, all.queries), dq = heads_of(dquery, in.query, all.queries),
             dk = heads_of(dkey, in.query, all.keys), dv = heads_of(dvalue, in.query, all.keys);
  parallel_for(0, all.count, 1, [&](int64_t begin, int64_t end) {
    const auto scratch = all.scratch(2);
    for (auto i = begin; i < end; i++)
      cpu_kernels().attention_backward(
          all.head(i),
          {gradient.read_head(all.heads, i), dq.head(all.heads, i), dk.head(all.heads, i), dv.head(all.heads, i)},
          scratch.get());
  });
}

}  // namespace tessera::numerics
