#include "tessera/compile/detail/codegen/pointwise.h"

#include <algorithm>
#include <string_view>

namespace tessera::compiler::codegen {
namespace {

struct PointwiseFormula {
  const char* name;
  const char* formula;
  int checked_argument = -1;  // if >= 0, this argument
  double required = 0;        // must be this number
};

// Each formula rounds at most once, so that C and LibTorch's vectorized kernels agree bitwise (with alpha = 1 as well:
// a fused multiply-add of 1 * b rounds once). Missing on purpose: ops that round twice, which LibTorch's compiler may
// have fused (addcmul, lerp), and transcendental functions, for which LibTorch calls Sleef or MKL.
constexpr PointwiseFormula kPointwiseFormulas[] = {
    {"aten.add.Scalar", "$0 + $1", 2, 1},
    {"aten.add.Tensor", "$0 + $1", 2, 1},
    {"aten.add_.Scalar", "$0 + $1", 2, 1},
    {"aten.add_.Tensor", "$0 + $1", 2, 1},
    {"aten.clone", "$0"},
    {"aten.copy_", "$1"},
    {"aten.div.Scalar", "$0 / $1"},
    {"aten.div.Tensor", "$0 / $1"},
    {"aten.div_.Scalar", "$0 / $1"},
    {"aten.div_.Tensor", "$0 / $1"},
    {"aten.fill_.Scalar", "$1"},
    {"aten.mul.Scalar", "$0 * $1"},
    {"aten.mul.Tensor", "$0 * $1"},
    {"aten.mul_.Scalar", "$0 * $1"},
    {"aten.mul_.Tensor", "$0 * $1"},
    {"aten.neg", "-$0"},
    {"aten.neg_", "-$0"},
    {"aten.pow.Tensor_Scalar", "$0 * $0", 1, 2},
    {"aten.relu", "$0 < 0 ? 0 : $0"},  // NaN stays NaN
    {"aten.relu_", "$0 < 0 ? 0 : $0"},
    {"aten.sub.Scalar", "$0 - $1", 2, 1},
    {"aten.sub.Tensor", "$0 - $1", 2, 1},
    {"aten.sub_.Scalar", "$0 - $1", 2, 1},
    {"aten.sub_.Tensor", "$0 - $1", 2, 1},
    {"aten.threshold_backward", "$1 <= $2 ? 0 : $0"},
    {"aten.zero_", "0"},
    {"aten._foreach_add.List", "$0 + $1", 2, 1},
    {"aten._foreach_add.Scalar", "$0 + $1"},
    {"aten._foreach_add_.List", "$0 + $1", 2, 1},
    {"aten._foreach_add_.Scalar", "$0 + $1"},
    {"aten._foreach_copy_", "$1"},
    {"aten._foreach_div.List", "$0 / $1"},
    {"aten._foreach_div.Scalar", "$0 / $1"},
    {"aten._foreach_div_.List", "$0 / $1"},
    {"aten._foreach_div_.Scalar", "$0 / $1"},
    {"aten._foreach_mul.List", "$0 * $1"},
    {"aten._foreach_mul.Scalar", "$0 * $1"},
    {"aten._foreach_mul_.List", "$0 * $1"},
    {"aten._foreach_mul_.Scalar", "$0 * $1"},
    {"aten._foreach_neg", "-$0"},
    {"aten._foreach_neg_", "-$0"},
    {"aten._foreach_zero_", "0"},
};

const PointwiseFormula* find_formula(const std::string& name) {
  for (const auto& each : kPointwiseFormulas)
    if (name == each.name) return &each;
  return nullptr;
}

std::optional<double> constant_number(const Arg& arg) {
  const auto* constant = std::get_if<c10::IValue>(&arg);
  if (!constant || !(constant->isInt() || constant->isDouble())) return {};
  return constant->toScalar().toDouble();
}

bool formula_uses(std::string_view formula, size_t i) {
  return formula.find("$" + std::to_string(i)) != std::string_view::npos;
}

// Is stored without gaps and without overlapping elements, in any order of dims.
bool is_dense(const Type& type) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t d = 0; d < type.sizes.size(); d++)
    if (type.sizes[d] != 1) dims.emplace_back(type.strides[d], type.sizes[d]);
  std::sort(dims.begin(), dims.end());
  int64_t next = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != next) return false;
    next *= size;
  }
  return true;
}

bool is_supported(const Type& type) {
  return (type.dtype == c10::kFloat || type.dtype == c10::kDouble) && type.device.is_cpu() && type.numel() > 0 &&
         !type.neg;
}

bool can_generate(const Program& program, const Assignment& made) {
  if (made.into == kNone) return false;
  const auto& type = program[made.into].type;
  if (!is_supported(type) || !is_dense(type)) return false;
  for (size_t i = 0; i < made.operands.size(); i++) {
    if (!formula_uses(made.formula, i)) continue;
    if (const auto* id = std::get_if<ValueId>(&made.operands[i])) {
      if (*id == kNone || program[*id].type.dtype != type.dtype || !program[*id].type.device.is_cpu() ||
          program[*id].type.neg || !same_element_layout(program[*id].type, type))
        return false;
    } else if (!constant_number(made.operands[i])) {
      return false;
    }
  }
  return true;
}

// A concatenation along dim 0 stores its inputs one after the other.
std::vector<Assignment> cat_assignment(const Program& program, const Node& node) {
  const auto* cat_inputs = std::get_if<ValueList>(&node.args[0]);
  const auto* into = std::get_if<ValueId>(&node.results[0]);
  const auto dim = constant_number(node.args[1]);
  if (!cat_inputs || !into || *into == kNone || !dim) return {};
  const auto& type = program[*into].type;
  if (!is_supported(type) || !type.is_contiguous()) return {};
  if (*dim != 0 && *dim != -static_cast<double>(type.sizes.size())) return {};
  for (const auto id : *cat_inputs)
    if (id == kNone || program[id].type.dtype != type.dtype || program[id].type.neg ||
        !program[id].type.is_contiguous())
      return {};
  return {{*into, "", {}, *cat_inputs}};
}

}  // namespace

std::vector<std::string> pointwise_ops() {
  std::vector<std::string> names;
  for (const auto& each : kPointwiseFormulas) names.emplace_back(each.name);
  return names;
}

bool same_element_layout(const Type& a, const Type& b) {
  if (a.numel() != b.numel()) return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  if (a.sizes != b.sizes || !is_dense(a)) return false;
  for (size_t d = 0; d < a.sizes.size(); d++)
    if (a.sizes[d] != 1 && a.strides[d] != b.strides[d]) return false;
  return true;
}

std::vector<Assignment> pointwise_of(const Node& node, const char* other_formula) {
  const auto* entry = find_formula(node.name());
  const auto checked = entry ? entry->checked_argument : -1;
  if (checked >= 0 && constant_number(node.args[static_cast<size_t>(checked)]) != entry->required) entry = nullptr;
  const auto* formula = entry ? entry->formula : other_formula;
  if (!formula) return {};
  const auto& target = node.schema().is_mutable() ? node.args[0] : node.results[0];
  const auto* each = std::get_if<ValueList>(&target);
  std::vector<Assignment> found(each ? each->size() : 1);
  for (size_t k = 0; k < found.size(); k++) {
    found[k].into = each ? (*each)[k] : std::get<ValueId>(target);
    found[k].formula = formula;
    for (size_t i = 0; i < node.args.size(); i++) {
      const auto* list = std::get_if<ValueList>(&node.args[i]);
      const auto operand = list ? Arg((*list)[k]) : node.args[i];
      const bool used = formula_uses(formula, i);
      if (used && !std::holds_alternative<ValueId>(operand) && !constant_number(operand)) return {};
      found[k].operands.push_back(used ? operand : Arg(c10::IValue()));
    }
  }
  return found;
}

std::vector<Assignment> assignments_of(const Program& program, const Node& node) {
  if (node.name() == "aten.cat") return cat_assignment(program, node);
  auto found = pointwise_of(node, nullptr);
  for (const auto& each : found)
    if (!can_generate(program, each)) return {};
  return found;
}

}  // namespace tessera::compiler::codegen
