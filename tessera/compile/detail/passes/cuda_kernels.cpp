#include "tessera/compile/detail/passes/kernel_rewrite.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/cuda/detail/fused_kernels.h"

#include <algorithm>
#include <optional>

// Replaces ops on bfloat16 CUDA tensors by kernels that read and write each element once (cuda/detail/fused_kernels.h).
//
//   add, native_layer_norm               ->  add_layer_norm
//   native_layer_norm_backward, add_     ->  layer_norm_backward_add
//   sum over all dims but the last       ->  sum_rows
//
// Law: they compute the same in float. Sums are in another order, so bits differ from eager mode.
namespace tessera::compiler {
namespace {

class CudaKernels : KernelRewrite {
 public:
  explicit CudaKernels(Program& program) : KernelRewrite(program, "tessera.cuda_kernel") {}

  Matched run() {
    Matched matched;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      if (removed_[n]) continue;
      const auto name = program_.nodes[n].name();
      if (name == "aten.native_layer_norm") matched.times += layer_norm(n);
      if (name == "aten.native_layer_norm_backward") matched.times += layer_norm_backward(n);
      if (name == "aten.sum.dim_IntList") matched.times += sum_rows(n);
    }
    if (matched.times > 0) rewrite();
    return matched;
  }

 private:
  bool is_bf16(ValueId id) const {
    return id != kNone && program_[id].type.dtype == c10::kBFloat16 && program_[id].type.is_contiguous();
  }
  bool is_statistic(ValueId id) const {
    return id != kNone && program_[id].type.dtype == c10::kFloat && program_[id].type.is_contiguous();
  }
  bool same_bf16(ValueId a, ValueId b) const {
    return is_bf16(a) && is_bf16(b) && program_[a].type.sizes == program_[b].type.sizes;
  }
  bool is_over_last_dim(const Arg& shape, ValueId x) const {
    const auto* constant = constant_or_null(shape);
    const auto& type = program_[x].type;
    return constant && constant->isIntList() && constant->toIntList().size() == 1 &&
           cuda::has_layer_norm(type.device, type.dtype, type.sizes.back());
  }
  // Does no node between the two use (or, with `writes`, write) the buffer of the value?
  bool untouched(size_t after, size_t before, ValueId id, bool writes) const {
    for (size_t n = after + 1; n < before; n++) {
      bool touched = false;
      const auto see = [&](ValueId other) { touched |= program_.buffer_of(other) == program_.buffer_of(id); };
      if (writes) {
        program_.nodes[n].each_write(see);
      } else {
        program_.nodes[n].each_read(see);
        program_.nodes[n].each_result(see);
      }
      if (touched || kernels_[n]) return false;
    }
    return true;
  }

  // The sum that layer norm normalizes, if it can be computed together with it.
  std::optional<size_t> sum_before(size_t n, ValueId x) const {
    const auto at = def_use_.def_node[static_cast<size_t>(x)];
    if (at < 0 || removed_[static_cast<size_t>(at)]) return {};
    const auto& add = program_.nodes[static_cast<size_t>(at)];
    if (add.name() != "aten.add.Tensor" || !is_one(add.args[2])) return {};
    const auto a = value_of(add.args[0]), b = value_of(add.args[1]);
    const auto from = static_cast<size_t>(at);
    const bool movable = same_bf16(a, x) && same_bf16(b, x) && untouched(from, n, x, false) &&
                         untouched(from, n, a, true) && untouched(from, n, b, true);
    return movable ? std::optional(from) : std::nullopt;
  }

  int64_t layer_norm(size_t n) {
    const auto& node = program_.nodes[n];
    const auto x = value_of(node.args[0]), weight = value_of(node.args[2]), bias = value_of(node.args[3]);
    const auto y = value_of(node.results[0]), mean = value_of(node.results[1]), rstd = value_of(node.results[2]);
    if (!same_bf16(x, y) || !is_bf16(weight) || !is_bf16(bias) || !is_statistic(mean) || !is_statistic(rstd)) return 0;
    if (!is_over_last_dim(node.args[1], x)) return 0;
    const auto eps = std::get<c10::IValue>(node.args[4]).toDouble();
    if (const auto add = sum_before(n, x)) {
      const auto& terms = program_.nodes[*add].args;
      kernels_[n] = {{x, y, mean, rstd},
                     {x, y, mean, rstd},
                     {value_of(terms[0]), value_of(terms[1]), weight, bias},
                     {eps},
                     "add_layer_norm"};
      removed_[*add] = 1;
    } else {
      kernels_[n] = {{y, mean, rstd}, {y, mean, rstd}, {x, weight, bias}, {eps}, "layer_norm"};
    }
    return 1;
  }

  int64_t layer_norm_backward(size_t n) {
    const auto& node = program_.nodes[n];
    const auto grad = value_of(node.args[0]), x = value_of(node.args[1]), mean = value_of(node.args[3]),
               rstd = value_of(node.args[4]), weight = value_of(node.args[5]);
    const auto dx = value_of(node.results[0]), dweight = value_of(node.results[1]), dbias = value_of(node.results[2]);
    if (!same_bf16(x, grad) || !same_bf16(x, dx) || !is_bf16(weight) || !is_statistic(mean) || !is_statistic(rstd))
      return 0;
    if (!is_bf16(dweight) || !is_bf16(dbias) || !is_over_last_dim(node.args[2], x)) return 0;
    set_layer_norm_backward(n, sum_after(n, dx, [&](ValueId into, size_t sum) {
                              return same_bf16(into, dx) && untouched(n, sum, into, false);
                            }));
    return 1;
  }

  int64_t sum_rows(size_t n) {
    const auto& node = program_.nodes[n];
    const auto x = value_of(node.args[0]), sum = value_of(node.results[0]);
    const auto* dims = constant_or_null(node.args[1]);
    const auto* dtype = constant_or_null(node.args[3]);
    if (!is_bf16(x) || !is_bf16(sum) || !dims || !dims->isIntList() || !dtype || !dtype->isNone()) return 0;
    const auto& type = program_[x].type;
    const auto ndim = static_cast<int64_t>(type.sizes.size());
    if (ndim < 2) return 0;
    std::vector<char> summed(type.sizes.size(), 0);
    for (const int64_t dim : dims->toIntList()) summed[static_cast<size_t>(dim < 0 ? dim + ndim : dim)] = 1;
    const bool all_but_last = !summed.back() && std::count(summed.begin(), summed.end(), 1) == ndim - 1;
    if (!all_but_last || !cuda::has_sum_rows(type.device, type.dtype, type.sizes.back())) return 0;
    kernels_[n] = {{sum}, {sum}, {x}, {}, "sum_rows"};
    return 1;
  }
};

}  // namespace

Matched cuda_kernels(Program& program) { return CudaKernels(program).run(); }

}  // namespace tessera::compiler
