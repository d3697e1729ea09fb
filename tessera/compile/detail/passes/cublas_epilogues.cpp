#include "tessera/compile/detail/passes/kernel_rewrite.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <optional>

// Products of bfloat16 CUDA matrices by cuBLASLt, with gelu, its derivative and the gradient of the bias computed on
// each tile before it is stored (cuda/detail/matmul.h).
//
//   %2 = aten.addmm(%bias, %0, %1, 1, 1)         outs (%3, %2) of matmul_gelu(%0, %1, %bias)
//   %3 = aten.gelu(%2, "tanh")                ->
//
//   %5 = aten.mm(%4, %w)                         out %5 of matmul_gelu_grad(%4, %w, %2)
//   %6 = aten.gelu_backward(%5, %2, "tanh")   ->
//
// Law: they compute the same in float and round once. The derivative is written into the memory of the product.
namespace tessera::compiler {
namespace {

class CublasEpilogues : KernelRewrite {
 public:
  explicit CublasEpilogues(Program& program) : KernelRewrite(program, "tessera.cuda_kernel") {}

  Matched run() {
    Matched matched;
    for (size_t n = 0; n < program_.nodes.size(); n++) matched.times += product(n);
    if (matched.times > 0) rewrite();
    for (const auto& [values, now] : moves_) move_views(program_, values, now);
    return matched;
  }

 private:
  bool is_bf16_on_cuda(ValueId id) const {
    return id != kNone && program_[id].type.dtype == c10::kBFloat16 && program_[id].type.device.is_cuda();
  }
  bool is_contiguous_bf16(ValueId id) const { return is_bf16_on_cuda(id) && program_[id].type.is_contiguous(); }
  // A matrix, row by row or column by column.
  bool is_operand(ValueId id) const {
    if (!is_bf16_on_cuda(id) || program_[id].type.sizes.size() != 2) return false;
    const auto& [sizes, strides] = std::tie(program_[id].type.sizes, program_[id].type.strides);
    // Vectors of 8 elements, which all algorithms for tensor cores need.
    const auto fits = [&](size_t inner) {
      return strides[inner] == 1 && strides[1 - inner] >= sizes[inner] && strides[1 - inner] % 8 == 0 &&
             sizes[inner] % 8 == 0 && sizes[1 - inner] > 0 && sizes[inner] > 0;
    };
    return (fits(1) || fits(0)) && program_[id].offset % 8 == 0;
  }
  bool in_buffer_of(ValueId a, ValueId b) const {
    return a != kNone && b != kNone && program_.buffer_of(a) == program_.buffer_of(b);
  }
  // All elements of `of`, in the same order.
  bool is_same_memory(ValueId a, ValueId of) const {
    return in_buffer_of(a, of) && is_contiguous_bf16(a) && program_[a].offset == program_[of].offset &&
           program_[a].type.numel() == program_[of].type.numel() &&
           program_[a].type.sizes.back() == program_[of].type.sizes.back();
  }
  bool is_written_between(size_t after, size_t before, ValueId id) const {
    for (size_t n = after + 1; n < before; n++) {
      bool written = false;
      program_.nodes[n].each_write([&](ValueId other) { written |= in_buffer_of(other, id); });
      if (written) return true;
    }
    return false;
  }
  static bool is_tanh(const Arg& arg) {
    const auto* constant = constant_or_null(arg);
    return constant && constant->isString() && constant->toStringRef() == "tanh";
  }

  int64_t product(size_t n) {
    const auto& node = program_.nodes[n];
    const bool has_bias = node.name() == "aten.addmm";
    if (!has_bias && node.name() != "aten.mm") return 0;
    const auto result = value_of(node.results[0]);
    const auto a = value_of(node.args[has_bias]), b = value_of(node.args[has_bias + 1]);
    if (!is_contiguous_bf16(result) || !is_operand(a) || !is_operand(b) || program_[result].type.sizes[1] % 8 != 0)
      return 0;
    if (!has_bias) {
      if (!gelu_grad(n, result, a, b)) kernels_[n] = {{result}, {result}, {a, b}, {}, "matmul"};
      return 1;
    }
    const auto bias = value_of(node.args[0]);
    const bool is_row = is_contiguous_bf16(bias) && program_[bias].type.sizes.size() == 1 && is_one(node.args[3]) &&
                        is_one(node.args[4]) && program_[bias].type.sizes[0] == program_[result].type.sizes[1];
    if (!is_row) return 0;
    if (!gelu(n, result, {a, b, bias})) kernels_[n] = {{result}, {result}, {a, b, bias}, {}, "matmul_bias"};
    return 1;
  }

  bool gelu(size_t n, ValueId result, const ValueList& ins) {
    for (size_t m = n + 1; m < program_.nodes.size(); m++) {
      const auto& node = program_.nodes[m];
      if (node.name() == "aten.gelu" && is_same_memory(value_of(node.args[0]), result)) {
        const auto out = value_of(node.results[0]);
        if (!is_tanh(node.args[1]) || !is_contiguous_bf16(out)) return false;
        kernels_[n] = {{out, result}, {out, result}, ins, {}, "matmul_gelu"};
        removed_[m] = 1;
        return true;
      }
      if (is_written_between(m - 1, m + 1, result)) return false;
    }
    return false;
  }

  // The only op that uses the product, through views or directly.
  std::optional<size_t> only_user(ValueId product) const {
    std::optional<size_t> found;
    for (const auto id : values_[static_cast<size_t>(program_.buffer_of(product))]) {
      if (def_use_.is_output[static_cast<size_t>(id)]) return {};
      for (const auto by : def_use_.users[static_cast<size_t>(id)]) {
        const auto at = static_cast<size_t>(by);
        if (is_view(program_, program_.nodes[at])) continue;
        if (found && *found != at) return {};
        found = at;
      }
    }
    return found;
  }

  bool gelu_grad(size_t n, ValueId result, ValueId a, ValueId b) {
    const auto user = only_user(result);
    if (!user || program_.nodes[*user].name() != "aten.gelu_backward") return false;
    const auto& node = program_.nodes[*user];
    const auto grad = value_of(node.args[0]), aux = value_of(node.args[1]), derivative = value_of(node.results[0]);
    const bool fits =
        is_same_memory(grad, result) && is_contiguous_bf16(aux) && is_contiguous_bf16(derivative) &&
        is_tanh(node.args[2]) && program_[aux].type.numel() == program_[result].type.numel() &&
        program_[aux].offset % 8 == 0 && program_[derivative].type.sizes == program_[grad].type.sizes &&
        program_[derivative].offset == 0 && def_use_.def_node[static_cast<size_t>(aux)] < static_cast<int32_t>(n) &&
        !is_written_between(n, *user, aux) && !def_use_.retained[static_cast<size_t>(program_.buffer_of(derivative))];
    if (!fits) return false;
    kernels_[n] = {{result}, {result}, {a, b, aux}, {}, "matmul_gelu_grad"};
    removed_[*user] = 1;
    replaced_.set(derivative, grad);
    moves_.emplace_back(values_[static_cast<size_t>(program_.buffer_of(derivative))], grad);
    return true;
  }

  // The values of a buffer, and the value that replaces it.
  std::vector<std::pair<std::vector<ValueId>, ValueId>> moves_;
};

}  // namespace

Matched cublas_epilogues(Program& program) { return CublasEpilogues(program).run(); }

}  // namespace tessera::compiler
