#include "tessera/compile/detail/passes/kernel_rewrite.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/cuda/detail/fused_kernels.h"

#include <algorithm>
#include <optional>

// Replaces ops on bfloat16 CUDA tensors by kernels that read and write each element once (cuda/detail/fused_kernels.h).
//
//   add, native_layer_norm               ->  add_layer_norm
//   native_layer_norm_backward, add_     ->  layer_norm_backward_add
//   add, _fused_rms_norm                 ->  add_rms_norm
//   _fused_rms_norm_backward, add_       ->  rms_norm_backward_add
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
      if (name == "aten.native_layer_norm") matched.times += norm(n, false);
      if (name == "aten._fused_rms_norm") matched.times += norm(n, true);
      if (name == "aten.native_layer_norm_backward") matched.times += norm_backward(n, false);
      if (name == "aten._fused_rms_norm_backward") matched.times += norm_backward(n, true);
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
  static ValueList values_of(const std::vector<Arg>& args, size_t begin, size_t end) {
    ValueList values;
    for (size_t i = begin; i < end; i++) values.push_back(value_of(args[i]));
    return values;
  }
  bool all_of(const ValueList& values, bool (CudaKernels::*is)(ValueId) const) const {
    return std::all_of(values.begin(), values.end(), [&](ValueId id) { return (this->*is)(id); });
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

  // native_layer_norm(x, shape, weight, bias, eps) -> y, mean, rstd;  _fused_rms_norm(x, shape, weight, eps) -> y, rstd
  int64_t norm(size_t n, bool is_rms) {
    const auto& node = program_.nodes[n];
    const auto x = value_of(node.args[0]), y = value_of(node.results[0]);
    const ValueList parameters = values_of(node.args, 2, is_rms ? 3 : 4);
    const ValueList statistics = values_of(node.results, 1, node.results.size());
    const auto* eps = constant_or_null(node.args.back());
    if (!same_bf16(x, y) || !all_of(parameters, &CudaKernels::is_bf16) ||
        !all_of(statistics, &CudaKernels::is_statistic) || !is_over_last_dim(node.args[1], x) || !eps ||
        !eps->isDouble())
      return 0;
    ValueList outs = {y}, ins = {x};
    const auto add = sum_before(n, x);
    if (add) {
      const auto& terms = program_.nodes[*add].args;
      outs = {x, y}, ins = {value_of(terms[0]), value_of(terms[1])};
      removed_[*add] = 1;
    }
    const char* name = is_rms ? (add ? "add_rms_norm" : "rms_norm") : (add ? "add_layer_norm" : "layer_norm");
    outs.insert(outs.end(), statistics.begin(), statistics.end());
    ins.insert(ins.end(), parameters.begin(), parameters.end());
    kernels_[n] = {outs, outs, ins, {eps->toDouble()}, name};
    return 1;
  }

  // native_layer_norm_backward(grad, x, shape, mean, rstd, weight, bias, mask) -> dx, dweight, dbias
  // _fused_rms_norm_backward(grad, x, shape, rstd, weight, mask) -> dx, dweight
  int64_t norm_backward(size_t n, bool is_rms) {
    const auto& node = program_.nodes[n];
    const size_t weight = is_rms ? 4 : 5;
    const auto grad = value_of(node.args[0]), x = value_of(node.args[1]), dx = value_of(node.results[0]);
    if (!same_bf16(x, grad) || !same_bf16(x, dx) || !is_bf16(value_of(node.args[weight])) ||
        !all_of(values_of(node.args, 3, weight), &CudaKernels::is_statistic) ||
        !all_of(values_of(node.results, 1, node.results.size()), &CudaKernels::is_bf16) ||
        !is_over_last_dim(node.args[2], x))
      return 0;
    const auto sum =
        sum_after(n, dx, [&](ValueId into, size_t at) { return same_bf16(into, dx) && untouched(n, at, into, false); });
    const char* alone = is_rms ? "rms_norm_backward" : "layer_norm_backward";
    set_norm_backward(n, weight, sum, alone, is_rms ? "rms_norm_backward_add" : "layer_norm_backward_add");
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
