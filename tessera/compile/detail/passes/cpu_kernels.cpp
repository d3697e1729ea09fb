#include "tessera/compile/detail/passes/kernel_rewrite.h"
#include "tessera/compile/detail/passes/passes.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

// Replaces ops on float32 CPU tensors by kernels that read and write each element once (kernels/cpu_kernel_op.h).
//
//   matmul, gelu                                    ->  matmul_gelu
//   matmul, gelu_backward                           ->  matmul_gelu_backward
//   gelu, gelu_backward, native_layer_norm          ->  gelu, gelu_backward, layer_norm
//   native_layer_norm_backward, add_                ->  layer_norm_backward_add
//   sum over all dims but the last                  ->  sum_rows
//   _scaled_dot_product_flash_attention_for_cpu     ->  attention
//   _log_softmax, nll_loss_forward                  ->  cross_entropy
//   nll_loss_backward, _log_softmax_backward_data   ->  cross_entropy_backward, without a copy of the logits
//
// Law: they compute the same. Sums are in another order, so bits differ from eager mode.
namespace tessera::compiler {
namespace {

constexpr int64_t kSmallestSum = 8192;  // elements; smaller ones are left to fuse_small_ops

class CpuKernelsPass : KernelRewrite {
 public:
  explicit CpuKernelsPass(Program& program) : KernelRewrite(program, "tessera.cpu_kernel") {}

  Matched run() {
    static const std::map<std::string, int64_t (CpuKernelsPass::*)(size_t)> rewrites = {
        {"aten.gelu", &CpuKernelsPass::gelu},
        {"aten.gelu_backward", &CpuKernelsPass::gelu_backward},
        {"aten.gelu_backward.grad_input", &CpuKernelsPass::gelu_backward},
        {"aten.native_layer_norm", &CpuKernelsPass::layer_norm},
        {"aten.native_layer_norm_backward", &CpuKernelsPass::layer_norm_backward},
        {"aten.sum.dim_IntList", &CpuKernelsPass::sum_rows},
        {"aten._scaled_dot_product_flash_attention_for_cpu", &CpuKernelsPass::attention},
        {"aten._scaled_dot_product_flash_attention_for_cpu_backward", &CpuKernelsPass::attention_backward},
        {"aten.nll_loss_forward", &CpuKernelsPass::cross_entropy},
    };
    Matched matched;
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto found = rewrites.find(program_.nodes[n].name());
      if (found != rewrites.end() && !removed_[n] && !kernels_[n]) matched.times += (this->*found->second)(n);
    }
    if (matched.times > 0) rewrite();
    return matched;
  }

 private:
  bool is_float(ValueId id) const {
    return id != kNone && program_[id].type.dtype == c10::kFloat && program_[id].type.device.is_cpu() &&
           !program_[id].type.neg;
  }
  bool is_contiguous_float(ValueId id) const { return is_float(id) && program_[id].type.is_contiguous(); }
  bool are_contiguous_floats(const ValueList& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](ValueId id) { return is_contiguous_float(id); });
  }
  bool same_sizes(ValueId a, ValueId b) const { return program_[a].type.sizes == program_[b].type.sizes; }
  bool is_in_buffer_of(ValueId a, ValueId b) const { return program_.buffer_of(a) == program_.buffer_of(b); }
  // Contiguous values with the same elements in memory.
  bool is_same_memory(ValueId a, ValueId b) const {
    return is_in_buffer_of(a, b) && program_[a].offset == program_[b].offset &&
           program_[a].type.numel() == program_[b].type.numel() && are_contiguous_floats({a, b});
  }
  // Does no node in (after, before) use (or, with `writes`, write) the buffer of the value? Views do not count.
  bool untouched(size_t after, size_t before, ValueId id, bool writes) const {
    for (size_t n = after + 1; n < before; n++) {
      if (removed_[n] || is_view(program_, program_.nodes[n]) || kind_of(program_.nodes[n]) == OpKind::Empty) continue;
      bool touched = false;
      const auto see = [&](ValueId other) { touched |= is_in_buffer_of(other, id); };
      program_.nodes[n].each_write(see);
      program_.nodes[n].each_result(see);
      if (!writes) program_.nodes[n].each_read(see);
      if (const auto& kernel = kernels_[n]) {  // which may read more than the node that it replaces
        std::for_each(kernel->outs.begin(), kernel->outs.end(), see);
        if (!writes) std::for_each(kernel->ins.begin(), kernel->ins.end(), see);
      }
      if (touched) return false;
    }
    return true;
  }
  const c10::IValue* constant(const Node& node, size_t argument) const { return constant_or_null(node.args[argument]); }
  // Is an optional tensor not given?
  static bool is_absent(const Arg& arg) {
    const auto* none = constant_or_null(arg);
    const auto* id = std::get_if<ValueId>(&arg);
    return (none && none->isNone()) || (id && *id == kNone);
  }

  // ---- gelu

  // 1 for "tanh", 0 for "none".
  std::optional<double> approximate(const Node& node, size_t argument) const {
    const auto* text = constant(node, argument);
    if (!text || !text->isString()) return {};
    return text->toStringRef() == "tanh" ? 1 : 0;
  }

  // The product by our kernel that is stored in the memory of `value` directly before node n, without an epilogue.
  // Between the two there are only views and allocations, so the node can be computed together with the product.
  std::optional<size_t> product_before(size_t n, ValueId value) const {
    for (auto at = n; at-- > 0;) {
      const auto& node = program_.nodes[at];
      if (removed_[at] || is_view(program_, node) || kind_of(node) == OpKind::Empty) continue;
      if (kernels_[at] || node.name() != "tessera.cpu_kernel") return {};
      const auto& kernel = constant(node, 3)->toStringRef();
      if (kernel != "matmul" && kernel != "matmul_bf16") return {};
      return is_same_memory(product_of(at), value) ? std::optional(at) : std::nullopt;
    }
    return {};
  }
  ValueId product_of(size_t n) const { return std::get<ValueList>(program_.nodes[n].args[0]).at(0); }
  const ValueList& operands_of(size_t n) const { return std::get<ValueList>(program_.nodes[n].args[1]); }
  bool rounds_to_bfloat16(size_t product) const {
    return constant(program_.nodes[product], 3)->toStringRef() == "matmul_bf16";
  }
  bool is_defined_before(size_t n, ValueId id) const {
    return def_use_.def_node[static_cast<size_t>(id)] < static_cast<int32_t>(n);
  }

  int64_t gelu(size_t n) {
    const auto& node = program_.nodes[n];
    const auto x = value_of(node.args[0]), out = value_of(node.results[0]);
    const auto tanh = approximate(node, 1);
    if (!tanh || !are_contiguous_floats({x, out}) || !same_sizes(x, out)) return 0;
    const auto product = product_before(n, x);
    if (product && operands_of(*product).size() == 3) {
      kernels_[*product] = {{product_of(*product), out},
                            {out},
                            operands_of(*product),
                            {*tanh},
                            rounds_to_bfloat16(*product) ? "matmul_gelu_bf16" : "matmul_gelu"};
      removed_[n] = 1;
    } else {
      kernels_[n] = {{out}, {out}, {x}, {*tanh}, "gelu"};
    }
    return 1;
  }

  int64_t gelu_backward(size_t n) {
    const auto& node = program_.nodes[n];
    const bool in_place = node.schema().is_mutable();
    const auto gradient = value_of(node.args[0]), x = value_of(node.args[1]),
               out = in_place ? value_of(node.args[3]) : value_of(node.results[0]);
    const auto tanh = approximate(node, 2);
    if (!tanh || !are_contiguous_floats({gradient, x, out}) || !same_sizes(x, out) || !same_sizes(gradient, x))
      return 0;
    if (in_place && (is_in_buffer_of(x, out) || (is_in_buffer_of(gradient, out) && !is_same_memory(gradient, out))))
      return 0;
    const auto product = in_place && is_same_memory(gradient, out) ? product_before(n, out) : std::nullopt;
    if (product && operands_of(*product).size() == 2 && is_defined_before(*product, x)) {
      const auto& operands = operands_of(*product);
      kernels_[*product] = {{product_of(*product)},
                            {},
                            {operands[0], operands[1], x},
                            {*tanh},
                            rounds_to_bfloat16(*product) ? "matmul_gelu_backward_bf16" : "matmul_gelu_backward"};
      removed_[n] = 1;
    } else {
      kernels_[n] = {{out}, in_place ? ValueList() : ValueList{out}, {gradient, x}, {*tanh}, "gelu_backward"};
    }
    if (in_place) replaced_.set(value_of(node.results[0]), replaced_(out));
    return 1;
  }

  // ---- layer norm

  bool is_over_last_dim(const Arg& shape, ValueId x) const {
    const auto* sizes = constant_or_null(shape);
    return sizes && sizes->isIntList() && sizes->toIntList().size() == 1 && !program_[x].type.sizes.empty() &&
           program_[x].type.numel() > 0;
  }

  int64_t layer_norm(size_t n) {
    const auto& node = program_.nodes[n];
    const auto x = value_of(node.args[0]), weight = value_of(node.args[2]), bias = value_of(node.args[3]);
    const auto y = value_of(node.results[0]), mean = value_of(node.results[1]), rstd = value_of(node.results[2]);
    if (!are_contiguous_floats({x, weight, bias, y, mean, rstd}) || !is_over_last_dim(node.args[1], x)) return 0;
    const auto* eps = constant(node, 4);
    if (!eps || !eps->isDouble()) return 0;
    kernels_[n] = {{y, mean, rstd}, {y, mean, rstd}, {x, weight, bias}, {eps->toDouble()}, "layer_norm"};
    return 1;
  }

  int64_t layer_norm_backward(size_t n) {
    const auto& node = program_.nodes[n];
    const auto gradient = value_of(node.args[0]), x = value_of(node.args[1]), mean = value_of(node.args[3]),
               rstd = value_of(node.args[4]), weight = value_of(node.args[5]);
    const auto dx = value_of(node.results[0]), dweight = value_of(node.results[1]), dbias = value_of(node.results[2]);
    if (!are_contiguous_floats({gradient, x, mean, rstd, weight, dx, dweight, dbias})) return 0;
    if (!is_over_last_dim(node.args[2], x)) return 0;
    const auto sum = sum_after(n, dx, [&](ValueId into, size_t at) {
      return is_contiguous_float(into) && same_sizes(into, dx) && untouched(n, at, into, false) &&
             !reads_buffer(program_.nodes[n], into);
    });
    set_norm_backward(n, /*weight=*/5, sum, "layer_norm_backward", "layer_norm_backward_add");
    return 1;
  }

  bool reads_buffer(const Node& node, ValueId id) const {
    bool reads = false;
    node.each_read([&](ValueId other) { reads |= is_in_buffer_of(other, id); });
    return reads;
  }

  // ---- sums over rows

  int64_t sum_rows(size_t n) {
    const auto& node = program_.nodes[n];
    const auto x = value_of(node.args[0]), sum = value_of(node.results[0]);
    const auto *dims = constant(node, 1), *dtype = constant(node, 3);
    if (!are_contiguous_floats({x, sum}) || !dims || !dims->isIntList() || !dtype || !dtype->isNone()) return 0;
    const auto& type = program_[x].type;
    const auto ndim = static_cast<int64_t>(type.sizes.size());
    if (ndim < 2 || type.numel() < kSmallestSum) return 0;
    std::vector<char> summed(type.sizes.size(), 0);
    for (const int64_t dim : dims->toIntList()) summed[static_cast<size_t>(dim < 0 ? dim + ndim : dim)] = 1;
    if (summed.back() || std::count(summed.begin(), summed.end(), 1) != ndim - 1) return 0;
    kernels_[n] = {{sum}, {sum}, {x}, {}, "sum_rows"};
    return 1;
  }

  // ---- attention

  // (batch, heads, length, dim) with unit stride in the last dim, and elements that do not share memory.
  bool is_heads(ValueId id) const {
    if (!is_float(id)) return false;
    const auto& type = program_[id].type;
    if (type.sizes.size() != 4 || type.numel() == 0) return false;
    return type.strides[3] == 1 && type.strides[2] >= type.sizes[3];
  }
  // {causal, scale}, if there is neither dropout nor a mask.
  std::optional<std::vector<double>> attention_numbers(const Node& node, size_t dropout, ValueId query) const {
    const auto *p = constant(node, dropout), *causal = constant(node, dropout + 1),
               *scale = constant(node, dropout + 3);
    if (!p || !causal || !scale || !is_absent(node.args[dropout + 2]) || !p->isDouble() || p->toDouble() != 0)
      return {};
    if (!causal->isBool() || !(scale->isNone() || scale->isDouble())) return {};
    const auto dim = static_cast<double>(program_[query].type.sizes[3]);
    return std::vector<double>{causal->toBool() ? 1.0 : 0.0, scale->isNone() ? 1 / std::sqrt(dim) : scale->toDouble()};
  }
  bool are_heads_of_equal_shapes(const ValueList& ids) const {
    return std::all_of(ids.begin(), ids.end(), [&](ValueId id) {
      return is_heads(id) && program_[id].type.sizes[1] == program_[ids[0]].type.sizes[1] &&
             program_[id].type.sizes[3] == program_[ids[0]].type.sizes[3];
    });
  }

  int64_t attention(size_t n) {
    const auto& node = program_.nodes[n];
    const auto query = value_of(node.args[0]), key = value_of(node.args[1]), value = value_of(node.args[2]),
               out = value_of(node.results[0]), logsumexp = value_of(node.results[1]);
    if (!are_heads_of_equal_shapes({query, key, value, out}) || !is_float(logsumexp)) return 0;
    if (program_[logsumexp].type.sizes.size() != 3) return 0;
    const auto numbers = attention_numbers(node, 3, query);
    if (!numbers) return 0;
    kernels_[n] = {{out, logsumexp}, {out, logsumexp}, {query, key, value}, *numbers, "attention"};
    return 1;
  }

  int64_t attention_backward(size_t n) {
    const auto& node = program_.nodes[n];
    ValueList ins;
    for (size_t i = 0; i < 6; i++) ins.push_back(value_of(node.args[i]));
    ValueList outs;
    for (const auto& result : node.results) outs.push_back(value_of(result));
    if (outs.size() != 3 || !is_float(ins[5]) || program_[ins[5]].type.sizes.size() != 3) return 0;
    if (!are_heads_of_equal_shapes({ins[0], ins[1], ins[2], ins[3], ins[4], outs[0], outs[1], outs[2]})) return 0;
    const auto numbers = attention_numbers(node, 6, ins[1]);
    if (!numbers) return 0;
    kernels_[n] = {outs, outs, ins, *numbers, "attention_backward"};
    return 1;
  }

  // ---- cross entropy

  // n: nll_loss_forward of a log_softmax that only the loss and its backward read.
  int64_t cross_entropy(size_t n) {
    const auto& loss_node = program_.nodes[n];
    const auto log_probabilities = value_of(loss_node.args[0]), target = value_of(loss_node.args[1]),
               loss = value_of(loss_node.results[0]), total_weight = value_of(loss_node.results[1]);
    const auto *reduction = constant(loss_node, 3), *ignored = constant(loss_node, 4);
    if (!is_absent(loss_node.args[2]) || !are_contiguous_floats({log_probabilities, loss, total_weight})) return 0;
    if (!reduction || !ignored || !reduction->isInt() || !ignored->isInt() || reduction->toInt() == 0) return 0;
    if (target == kNone || program_[target].type.dtype != c10::kLong || !program_[target].type.is_contiguous())
      return 0;
    const auto softmax = def_use_.def_node[static_cast<size_t>(log_probabilities)];
    if (softmax < 0) return 0;
    const auto from = static_cast<size_t>(softmax);
    const auto& softmax_node = program_.nodes[from];
    if (softmax_node.name() != "aten._log_softmax") return 0;
    const auto logits = value_of(softmax_node.args[0]);
    if (!is_contiguous_float(logits) || !is_last_of_two_dims(softmax_node, 1, logits)) return 0;
    const auto backward = cross_entropy_backward(n, log_probabilities, total_weight);
    if (!backward) return 0;
    const auto last = backward->softmax ? *backward->softmax : n;
    if (!untouched(from, last, logits, true) || !untouched(from, last, target, true)) return 0;
    const std::vector<double> numbers = {static_cast<double>(reduction->toInt()),
                                         static_cast<double>(ignored->toInt())};
    Type row_type = program_[logits].type;
    row_type.sizes = {program_[logits].type.sizes[0]}, row_type.strides = {1};
    const auto logsumexp = program_.add(row_type);
    kernels_[n] = {{loss, logsumexp}, {loss, logsumexp}, {logits, target}, numbers, "cross_entropy"};
    removed_[from] = 1;
    if (!backward->softmax) return 1;
    const auto dlogits = value_of(program_.nodes[last].results[0]);
    const auto gradient = value_of(program_.nodes[*backward->loss].args[0]);
    kernels_[last] = {{dlogits}, {dlogits}, {gradient, logits, target, logsumexp}, numbers, "cross_entropy_backward"};
    removed_[*backward->loss] = 1;
    return 1;
  }

  bool is_last_of_two_dims(const Node& node, size_t argument, ValueId logits) const {
    const auto* dim = constant(node, argument);
    const auto& sizes = program_[logits].type.sizes;
    return dim && dim->isInt() && sizes.size() == 2 && (dim->toInt() == 1 || dim->toInt() == -1) &&
           program_[logits].type.numel() > 0;
  }

  // The nodes of backward; none if the program has no backward.
  struct LossBackward {
    std::optional<size_t> loss, softmax;
  };
  // Nullopt if anything else reads the log probabilities, or what only backward should read.
  std::optional<LossBackward> cross_entropy_backward(size_t n, ValueId log_probabilities, ValueId total_weight) const {
    const auto alone_in_buffer = [&](ValueId id) {
      const auto b = static_cast<size_t>(program_.buffer_of(id));
      return values_[b].size() == 1 && !def_use_.has_output[b] && !def_use_.external[b];
    };
    if (!alone_in_buffer(log_probabilities) || !alone_in_buffer(total_weight)) return {};
    LossBackward found;
    for (const auto user : def_use_.users[static_cast<size_t>(log_probabilities)]) {
      const auto at = static_cast<size_t>(user);
      const auto name = program_.nodes[at].name();
      if (at == n) continue;
      if (name == "aten.nll_loss_backward" && !found.loss)
        found.loss = at;
      else if (name == "aten._log_softmax_backward_data" && !found.softmax)
        found.softmax = at;
      else
        return {};
    }
    if (found.loss.has_value() != found.softmax.has_value()) return {};
    for (const auto user : def_use_.users[static_cast<size_t>(total_weight)])
      if (!found.loss || static_cast<size_t>(user) != *found.loss) return {};
    if (!found.loss) return found;
    const auto &loss = program_.nodes[*found.loss], &softmax = program_.nodes[*found.softmax];
    const auto gradient = value_of(loss.results[0]);
    const bool fits = gradient != kNone && alone_in_buffer(gradient) && value_of(softmax.args[0]) == gradient &&
                      def_use_.only_user(gradient) == static_cast<int32_t>(*found.softmax) &&
                      is_contiguous_float(value_of(loss.args[0])) && is_absent(loss.args[3]) &&
                      program_[value_of(loss.args[0])].type.numel() == 1 &&
                      value_of(loss.args[2]) == value_of(program_.nodes[n].args[1]) &&
                      same(loss.args[4], program_.nodes[n].args[3]) && same(loss.args[5], program_.nodes[n].args[4]) &&
                      value_of(loss.args[6]) == total_weight && value_of(softmax.args[1]) == log_probabilities &&
                      is_contiguous_float(value_of(softmax.results[0])) &&
                      untouched(*found.loss, *found.softmax, value_of(loss.args[0]), true);
    return fits ? std::optional(found) : std::nullopt;
  }
};

}  // namespace

Matched cpu_kernels(Program& program) { return CpuKernelsPass(program).run(); }

}  // namespace tessera::compiler
