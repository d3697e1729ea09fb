#include "tessera/compile/detail/ir/def_use.h"
#include "tessera/compile/detail/ir/op_table.h"
#include "tessera/compile/detail/passes/passes.h"
#include "tessera/numerics/detail/vector/cpu_kernels.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <string_view>

// Rounds to bfloat16 only where it pays, in matrix products: they round their operands while they copy them
// (numerics/detail/vector/bfloat16_product.inc). Other values of the program in bfloat16 become float32, and the casts
// between vanish.
//
//   %2: bf16[64, 32] = aten._to_copy(%0, 15, ...)
//   %3: bf16[32, 48] = aten._to_copy(%1, 15, ...)         %4: f32[64, 48] = aten.empty_strided(...)
//   %4: bf16[64, 48] = aten.mm(%2, %3)               ->   tessera.cpu_kernel([%4!], [%0, %1], [], "matmul_bf16")
//   %5: bf16[64, 48] = aten.gelu(%4, "none")              %5: f32[64, 48] = aten.gelu(%4, "none")
//
// Law: each op computes the same with fewer roundings. Memory of the caller keeps its dtype, and so does what ops use
// that are faster in bfloat16, or that communicate: casts are inserted there.
namespace tessera::compiler {
namespace {

constexpr double kSmallestProduct = 1 << 15;  // multiplications
constexpr int64_t kSmallInput = 1 << 14;      // elements
constexpr std::array<std::string_view, 7> kFasterInBfloat16 = {
    "aten::bmm",           "aten::baddbmm",   "aten::convolution",  "aten::convolution_backward",
    "aten::mkldnn_linear", "aten::embedding", "aten::embedding_bag"};

bool has_unit_stride(const Type& type) {
  return type.sizes.size() == 2 && !type.neg &&
         ((type.strides[1] == 1 && type.strides[0] >= type.sizes[1]) ||
          (type.strides[0] == 1 && type.strides[1] >= type.sizes[0]));
}

class WidenBfloat16 {
 public:
  WidenBfloat16(Program& program, bool rounds_in_products)
      : program_(program),
        rounds_in_products_(rounds_in_products),
        def_use_(program),
        values_(values_by_buffer(program)),
        uses_(static_cast<size_t>(program.buffers)),
        writes_(uses_),
        replaced_(program) {}

  Matched run() {
    if (rounds_in_products_ && std::none_of(program_.nodes.begin(), program_.nodes.end(),
                                            [&](const Node& node) { return product_of(node).has_value(); }))
      return {};
    find_wide_buffers();
    note_uses();
    for (size_t b = 0; b < wide_.size(); b++)
      for (const auto id : values_[b])
        if (wide_[b]) program_.values[static_cast<size_t>(id)].type.dtype = c10::kFloat;
    bytes_ = program_.buffer_bytes();
    std::vector<Node> nodes;
    std::swap(nodes, program_.nodes);
    for (size_t n = 0; n < nodes.size(); n++) {
      replaced_.rewrite_reads(nodes[n]);
      rewrite(n, std::move(nodes[n]));
    }
    program_.nodes.insert(program_.nodes.begin(), std::make_move_iterator(first_.begin()),
                          std::make_move_iterator(first_.end()));
    replaced_.rewrite_outputs(program_);
    return matched_;
  }

 private:
  bool is_bfloat16(ValueId id) const {
    return program_[id].type.dtype == c10::kBFloat16 && program_[id].type.device.is_cpu();
  }
  bool is_wide(ValueId id) const {
    const auto b = static_cast<size_t>(program_.buffer_of(id));
    return b < wide_.size() && wide_[b];
  }

  // Attention counts as random, because it can have dropout.
  static bool draws(const Node& node) {
    const auto name = node.name();
    if (name != "aten._scaled_dot_product_flash_attention_for_cpu") return kind_of(node) == OpKind::Random;
    const auto* dropout = constant_or_null(node.args[3]);
    return !dropout || !dropout->isDouble() || dropout->toDouble() != 0;
  }

  // Can the op compute in float32 what it computes in bfloat16?
  bool can_widen(const Node& node) const {
    if (is_view(program_, node) || node.name() == "aten._to_copy") return true;
    const auto& name = node.op.operator_name().name;
    const auto kind = kind_of(node);
    if (draws(node) || !(kind == OpKind::Plain || kind == OpKind::Empty || kind == OpKind::Random) ||
        !name.starts_with("aten::"))
      return false;
    if (rounds_in_products_ &&
        std::find(kFasterInBfloat16.begin(), kFasterInBfloat16.end(), name) != kFasterInBfloat16.end())
      return false;
    if (kind == OpKind::Empty) return true;
    const auto& arguments = node.schema().arguments();
    for (size_t i = 0; i < node.args.size(); i++) {
      const auto* constant = constant_or_null(node.args[i]);
      if (arguments[i].name().ends_with("dtype") && constant && !constant->isNone()) return false;
    }
    return std::all_of(node.results.begin(), node.results.end(),
                       [](const Arg& result) { return !std::holds_alternative<ValueList>(result); });
  }

  // Wide: float32 from now on. Of a buffer of the program, whose definition and writes can all be computed so.
  void find_wide_buffers() {
    wide_.assign(static_cast<size_t>(program_.buffers), 0);
    for (size_t b = 0; b < wide_.size(); b++)
      wide_[b] = !values_[b].empty() && !def_use_.external[b] && !def_use_.has_output[b] &&
                 std::all_of(values_[b].begin(), values_[b].end(), [&](ValueId id) {
                   return is_bfloat16(id) && !program_[id].type.neg && !program_[id].type.conj;
                 });
    const auto keep = [&](ValueId id) { wide_[static_cast<size_t>(program_.buffer_of(id))] = 0; };
    for (const auto& node : program_.nodes) {
      if (can_widen(node)) continue;
      node.each_write(keep);
      node.each_result(keep);
    }
    for (bool changed = true; changed;) {  // an op that writes into both kinds computes in bfloat16
      changed = false;
      for (const auto& node : program_.nodes) {
        bool narrow = false, wide = false;
        node.each_write([&](ValueId id) {
          wide |= is_wide(id);
          narrow |= !is_wide(id) && is_bfloat16(id);
        });
        if (!narrow || !wide) continue;
        node.each_write(keep);
        changed = true;
      }
    }
  }

  void note_uses() {
    for (size_t n = 0; n < program_.nodes.size(); n++) {
      const auto& node = program_.nodes[n];
      const auto note = [&](auto& list) {
        return [&list, n, this](ValueId id) { list[static_cast<size_t>(program_.buffer_of(id))].push_back(n); };
      };
      node.each_read(note(uses_));
      node.each_result(note(uses_));
      node.each_write(note(writes_));
    }
  }

  void rewrite(size_t n, Node node) {
    bool touches = false;
    const auto see = [&](ValueId id) { touches |= is_wide(id) || is_bfloat16(id); };
    node.each_read(see);
    node.each_result(see);
    if (!touches || is_view(program_, node)) return program_.nodes.push_back(std::move(node));
    if (kind_of(node) == OpKind::Empty)  // empty_like() of a value that is wide now can have a result that is not
      return program_.nodes.push_back(allocation_of(program_, value_of(node.results[0])));
    const auto name = node.name();
    if (name == "aten._to_copy") return rewrite_cast(n, std::move(node));
    if (name == "aten.copy_") return program_.nodes.push_back(std::move(node));  // converts
    bool writes_narrow = false;
    node.each_write([&](ValueId id) { writes_narrow |= is_bfloat16(id); });
    if (writes_narrow || !can_widen(node)) {
      node.replace_reads([&](ValueId id) { return is_wide(id) ? cast(id, c10::kBFloat16) : id; });
      return program_.nodes.push_back(std::move(node));
    }
    if (rewrite_product(n, node)) return;
    node.replace_reads([&](ValueId id) { return is_bfloat16(id) ? widened(n, id) : id; });
    emit(std::move(node));
  }

  // float32 copies of small inputs, such as biases, are made once, before all other nodes.
  ValueId widened(size_t n, ValueId id) {
    const auto b = static_cast<size_t>(program_.buffer_of(id));
    if (def_use_.def_node[static_cast<size_t>(id)] >= 0 || program_[id].type.numel() > kSmallInput ||
        (!writes_[b].empty() && writes_[b].front() < n))
      return cast(id, c10::kFloat);
    const auto [at, is_new] = of_inputs_.try_emplace(id, kNone);
    if (is_new) {
      at->second = wide_copy(id);
      first_.push_back(cast_node(id, at->second));
    }
    return at->second;
  }
  ValueId cast(ValueId id, c10::ScalarType dtype) {
    auto type = program_[id].type;
    type.dtype = dtype;
    const auto result = program_.add(std::move(type));
    program_.nodes.push_back(cast_node(id, result));
    return result;
  }
  Node cast_node(ValueId from, ValueId to) const {
    return {find_op("aten._to_copy"),
            {from, c10::IValue(static_cast<int64_t>(program_[to].type.dtype)), c10::IValue(), c10::IValue(),
             c10::IValue(), c10::IValue(false), c10::IValue()},
            {to}};
  }

  // Adds a node that computes in float32. Results that stay bfloat16 are cast after it.
  void emit(Node node) {
    std::vector<std::pair<ValueId, ValueId>> narrow;
    for (auto& result : node.results) {
      const auto id = value_of(result);
      if (id == kNone || !is_bfloat16(id)) continue;
      narrow.emplace_back(wide_copy(id), id);
      result = narrow.back().first;
    }
    program_.nodes.push_back(std::move(node));
    for (const auto& [from, to] : narrow) program_.nodes.push_back(cast_node(from, to));
  }
  ValueId wide_copy(ValueId id) {
    auto type = program_[id].type;
    type.dtype = c10::kFloat;
    return program_.add(std::move(type));
  }

  struct ProductArguments {
    ValueId out, a, b, bias;  // bias: may be kNone
  };
  // A product that our kernel can compute, and that is large enough for it. Before and after values are wide.
  std::optional<ProductArguments> product_of(const Node& node) const {
    const auto name = node.name();
    const bool adds = name == "aten.addmm";
    if (name != "aten.mm" && !(adds && is_one(node.args[3]) && is_one(node.args[4]))) return {};
    const ProductArguments product{value_of(node.results[0]), value_of(node.args[adds]), value_of(node.args[adds + 1]),
                                   adds ? value_of(node.args[0]) : kNone};
    if (product.out == kNone || product.a == kNone || product.b == kNone || (adds && product.bias == kNone)) return {};
    const auto &out = program_[product.out].type, &a = program_[product.a].type, &b = program_[product.b].type;
    if (!(is_bfloat16(product.out) || is_wide(product.out)) || !has_unit_stride(a) || !has_unit_stride(b) ||
        !out.is_contiguous() || static_cast<double>(out.numel()) * static_cast<double>(a.sizes[1]) < kSmallestProduct)
      return {};
    if (adds) {
      const auto& bias = program_[product.bias].type;
      if (bias.sizes.size() != 1 || !bias.is_contiguous() || bias.sizes[0] != b.sizes[1]) return {};
    }
    return product;
  }

  bool rewrite_product(size_t n, const Node& node) {
    const auto product = rounds_in_products_ ? product_of(node) : std::nullopt;
    if (!product) return false;
    const auto [result, a, b, bias] = *product;
    const auto out = is_bfloat16(result) ? wide_copy(result) : result;
    ValueList ins = {a, b};
    if (bias != kNone) ins.push_back(is_bfloat16(bias) ? widened(n, bias) : bias);
    program_.nodes.push_back(allocation_of(program_, out));
    program_.nodes.push_back(
        {find_op("tessera.cpu_kernel"),
         {ValueList{out}, std::move(ins), c10::IValue(std::vector<double>()), c10::IValue("matmul_bf16")},
         {},
         node.module});
    if (out != result) program_.nodes.push_back(cast_node(out, result));
    matched_.times++;
    return true;
  }

  // A cast between values that are both float32 now: the result takes the memory of its argument, if nothing writes one
  // of the two while the other one is used.
  void rewrite_cast(size_t n, Node node) {
    const auto from = value_of(node.args[0]), to = value_of(node.results[0]);
    const auto &before = program_[from].type, &after = program_[to].type;
    if (before.dtype != c10::kFloat || after.dtype != c10::kFloat || before != after || !can_share(n, from, to)) {
      node.args[1] = c10::IValue(static_cast<int64_t>(after.dtype));
      return program_.nodes.push_back(std::move(node));
    }
    const auto source = static_cast<size_t>(program_.buffer_of(from)),
               result = static_cast<size_t>(program_.buffer_of(to));
    const auto shift = program_[from].offset - program_[to].offset;
    for (const auto id : values_[result]) {
      program_.values[static_cast<size_t>(id)].buffer = static_cast<int32_t>(source);
      program_.values[static_cast<size_t>(id)].offset += shift;
      values_[source].push_back(id);
    }
    for (auto* list : {&uses_, &writes_}) {
      auto &into = (*list)[source], &moved = (*list)[result];
      into.insert(into.end(), moved.begin(), moved.end());
      std::sort(into.begin(), into.end());
      moved.clear();
    }
    def_use_.has_output[source] |= def_use_.has_output[result];
    values_[result].clear();
    replaced_.set(to, from);
    matched_.times++;
  }

  bool can_share(size_t n, ValueId from, ValueId to) const {
    const auto source = static_cast<size_t>(program_.buffer_of(from)),
               result = static_cast<size_t>(program_.buffer_of(to));
    const auto& external = def_use_.external;
    const auto& has_output = def_use_.has_output;
    if (source == result || external[result]) return false;
    const auto& value = program_[from];
    const bool is_all = value.offset == 0 && value.type.span() * value.type.itemsize() == bytes_[source];
    if (has_output[result] && (external[source] || has_output[source] || !is_all)) return false;
    const auto last = [&](size_t b) { return has_output[b] ? std::numeric_limits<size_t>::max() : uses_[b].back(); };
    const auto writes_until = [&](size_t b, size_t end) {
      return std::any_of(writes_[b].begin(), writes_[b].end(), [&](size_t w) { return w > n && w <= end; });
    };
    if (external[source] && !writes_[result].empty()) return false;
    return !writes_until(source, last(result)) && (external[source] || !writes_until(result, last(source)));
  }

  Program& program_;
  const bool rounds_in_products_;
  DefUse def_use_;  // of the program before; has_output follows values that move to other memory
  std::vector<std::vector<ValueId>> values_;        // by buffer
  std::vector<std::vector<size_t>> uses_, writes_;  // by buffer: nodes of the program before
  ReplacedValues replaced_;
  std::vector<char> wide_;                // by buffer
  std::vector<int64_t> bytes_;            // by buffer
  std::map<ValueId, ValueId> of_inputs_;  // input, its float32 copy
  std::vector<Node> first_;               // the nodes that make these copies
  Matched matched_;
};

}  // namespace

Matched widen_bfloat16(Program& program) {
  return numerics::cpu_kernels().multiply_bfloat16 ? WidenBfloat16(program, true).run() : Matched{};
}

void compute_in_float32(Program& program) { WidenBfloat16(program, false).run(); }

}  // namespace tessera::compiler
