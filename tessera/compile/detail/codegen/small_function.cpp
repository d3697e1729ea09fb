#include "tessera/compile/detail/codegen/small_function.h"

#include "tessera/compile/detail/ir/def_use.h"

#include <algorithm>
#include <limits>
#include <optional>

namespace tessera::compiler::codegen {
namespace {

constexpr int64_t kMaxElements = 8192;          // of a result, or of what is summed
constexpr int64_t kMaxMultiplications = 32768;  // of a product: about one microsecond
constexpr size_t kMaxStatements = 256;          // the compiler's time grows faster than the source

// Can two elements have the same address? May say yes although they cannot.
bool may_overlap(const Type& type) {
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (size_t d = 0; d < type.sizes.size(); d++)
    if (type.sizes[d] > 1) dims.emplace_back(type.strides[d], type.sizes[d]);
  std::sort(dims.begin(), dims.end());
  int64_t next = 1;
  for (const auto& [stride, size] : dims) {
    if (stride < next) return true;
    next = stride * size;
  }
  return false;
}

bool can_expand(const Type& type, const std::vector<int64_t>& sizes) {
  if (type.sizes.size() > sizes.size()) return false;
  const auto offset = sizes.size() - type.sizes.size();
  for (size_t d = 0; d < type.sizes.size(); d++)
    if (type.sizes[d] != 1 && type.sizes[d] != sizes[offset + d]) return false;
  return true;
}

std::string times(int64_t stride, const std::string& variable) {
  return stride == 1 ? variable : variable + " * " + std::to_string(stride);
}

// "[i0 * 8 + i1]": the element of `type`, expanded to `dims` loops over i0, i1, ...
std::string element(const Type& type, size_t dims) {
  std::string index;
  for (size_t d = 0; d < type.sizes.size(); d++) {
    if (type.sizes[d] == 1 || type.strides[d] == 0) continue;
    index += (index.empty() ? "" : " + ") + times(type.strides[d], "i" + std::to_string(dims - type.sizes.size() + d));
  }
  return "[" + (index.empty() ? "0" : index) + "]";
}

std::string for_loop(const std::string& variable, int64_t size) {
  return "for (int64_t " + variable + " = 0; " + variable + " < " + std::to_string(size) + "; " + variable + "++) ";
}

// One loop per dim, i0 outside. A dim of size 1 has index 0.
std::string loops_over(const std::vector<int64_t>& sizes) {
  std::string text;
  for (size_t d = 0; d < sizes.size(); d++)
    if (sizes[d] != 1) text += for_loop("i" + std::to_string(d), sizes[d]);
  return text;
}

// Formulas beyond those of pointwise.cpp: they round more than once, or call the C library.
constexpr struct {
  const char* name;
  const char* formula;
} kSmallFormulas[] = {
    {"aten.add.Tensor", "$0 + $2 * $1"},
    {"aten.add_.Tensor", "$0 + $2 * $1"},
    {"aten.sub.Tensor", "$0 - $2 * $1"},
    {"aten.sub_.Tensor", "$0 - $2 * $1"},
    {"aten.exp", "std::exp($0)"},
    {"aten.full", "$1"},
    {"aten.full_like", "$1"},
    {"aten.ones", "1"},
    {"aten.ones_like", "1"},
    {"aten.pow.Tensor_Scalar", "std::pow($0, $1)"},
    {"aten.sigmoid", "1 / (1 + std::exp(-$0))"},
    {"aten.sigmoid_backward", "$0 * (1 - $1) * $1"},
    {"aten.sqrt", "std::sqrt($0)"},
    {"aten.tanh", "std::tanh($0)"},
    {"aten.tanh_backward", "$0 * (1 - $1 * $1)"},
    {"aten.zeros", "0"},
    {"aten.zeros_like", "0"},
    {"aten._foreach_add_.Tensor", "$0 + $2 * $1"},
};

const char* small_formula(const std::string& name) {
  for (const auto& each : kSmallFormulas)
    if (name == each.name) return each.formula;
  return nullptr;
}

}  // namespace

bool SmallFunctionWriter::is_number_tensor(ValueId id) const {
  if (id == kNone) return false;
  const auto& type = (*program_)[id].type;
  return (type.dtype == c10::kFloat || type.dtype == c10::kDouble) && type.device.is_cpu() && !type.neg;
}

std::string SmallFunctionWriter::pointer(ValueId id, bool written) {
  const auto [at, is_new] = pointer_at_.try_emplace(location_of(*program_, id), pointers_.size());
  if (is_new) pointers_.push_back({"p" + std::to_string(pointers_.size()), id, false});
  auto& found = pointers_[at->second];
  found.written |= written;
  return found.name;
}

std::string SmallFunctionWriter::number(const Arg& arg) {
  if (const auto* live = std::get_if<RuntimeScalar>(&arg)) {
    auto at = std::find(numbers_.begin(), numbers_.end(), *live);
    if (at == numbers_.end()) {
      if (numbers_.size() == kMaxNumbers) return "";
      at = numbers_.insert(at, *live);
    }
    return "numbers[" + std::to_string(at - numbers_.begin()) + "]";
  }
  const auto* constant = constant_or_null(arg);
  if (!constant || !(constant->isInt() || constant->isDouble())) return "";
  return constant_literal(*constant, c10::kDouble);
}

bool SmallFunctionWriter::add(const Node& node) {
  if (statements_ == kMaxStatements) return false;
  const bool pointwise = add_pointwise(node);
  if (!pointwise && !add_product(node) && !add_sum(node) && !add_adam(node)) return false;
  statements_++;
  changes_rounding_ |= !pointwise;
  return true;
}

bool SmallFunctionWriter::add_pointwise(const Node& node) {
  auto assignments = pointwise_of(node, small_formula(node.name()));
  if (assignments.empty()) return false;
  for (const auto& each : assignments) {
    if (!is_number_tensor(each.into)) return false;
    const auto& type = (*program_)[each.into].type;
    if (type.numel() > kMaxElements || may_overlap(type)) return false;
    for (const auto& operand : each.operands) {
      const auto id = value_of(operand);
      if (!std::holds_alternative<ValueId>(operand)) continue;
      if (!is_number_tensor(id) || (*program_)[id].type.dtype != type.dtype ||
          !can_expand((*program_)[id].type, type.sizes))
        return false;
      const bool same_memory = location_of(*program_, id) == location_of(*program_, each.into) &&
                               (*program_)[id].type.sizes == type.sizes && (*program_)[id].type.strides == type.strides;
      if (program_->buffer_of(id) == program_->buffer_of(each.into) && !same_memory) return false;
    }
  }
  for (const auto& each : assignments) {
    const auto& type = (*program_)[each.into].type;
    bool linear = type.is_contiguous();
    for (const auto& operand : each.operands)
      if (const auto id = value_of(operand); id != kNone)
        linear &= (*program_)[id].type.numel() == 1 ||
                  ((*program_)[id].type.sizes == type.sizes && (*program_)[id].type.is_contiguous());
    const auto at = [&](const Type& t) {
      return linear ? std::string(t.numel() == 1 ? "[0]" : "[i]") : element(t, type.sizes.size());
    };
    const auto read_element = [&](ValueId id) { return read(id) + at((*program_)[id].type); };
    text_ << "  " << (linear ? for_loop("i", type.numel()) : loops_over(type.sizes)) << write(each.into) << at(type)
          << " = " << formula_text(each, type.dtype, read_element) << ";\n";
  }
  return true;
}

// By rows: row[j] += a[i, k] * b[k, j]. If the elements of a row of b are not adjacent, b is copied first.
bool SmallFunctionWriter::add_product(const Node& node) {
  const auto name = node.name();
  const bool adds = name == "aten.addmm";
  if (name != "aten.mm" && !(adds && is_one(node.args[3]) && is_one(node.args[4]))) return false;
  const auto out = value_of(node.results[0]), bias = adds ? value_of(node.args[0]) : kNone,
             a = value_of(node.args[adds]), b = value_of(node.args[adds + 1U]);
  for (const auto id : {out, a, b, adds ? bias : out})
    if (!is_number_tensor(id) || (*program_)[id].type.dtype != (*program_)[out].type.dtype) return false;
  const auto &to = (*program_)[out].type, &left = (*program_)[a].type, &right = (*program_)[b].type;
  const auto m = to.sizes[0], n = to.sizes[1], k = left.sizes[1];
  const auto at_most = [](int64_t x, int64_t y, int64_t limit) { return x == 0 || y <= limit / x; };
  if (!at_most(m, n, kMaxElements) || !at_most(k, n, kMaxMultiplications) ||
      !at_most(std::max<int64_t>(m, 1) * n, k, kMaxMultiplications))
    return false;
  if (adds && !can_expand((*program_)[bias].type, to.sizes)) return false;
  const auto type = c_type(to.dtype);
  const auto number_of = [](int64_t x) { return std::to_string(x); };
  const bool copied = right.strides[1] != 1 && n > 1;
  text_ << "  {\n";
  if (copied)
    text_ << "    " << type << " b[" << std::max<int64_t>(k * n, 1) << "];\n    " << for_loop("l", k)
          << for_loop("j", n) << "b[l * " << n << " + j] = " << read(b) << "[" << times(right.strides[0], "l") << " + "
          << times(right.strides[1], "j") << "];\n";
  else
    text_ << "    const " << type << "* b = " << read(b) << ";\n";
  text_ << "    " << for_loop("i0", m) << "{\n      " << type << " row[" << std::max<int64_t>(n, 1) << "];\n      "
        << for_loop("i1", n) << "row[i1] = " << (adds ? read(bias) + element((*program_)[bias].type, 2) : "0")
        << ";\n      " << for_loop("l", k) << "{\n        const " << type << " x = " << read(a) << "["
        << times(left.strides[0], "i0") << " + " << times(left.strides[1], "l") << "];\n        " << for_loop("j", n)
        << "row[j] = std::fma(x, b[l * " << number_of(copied ? n : right.strides[0])
        << " + j], row[j]);\n      }\n      " << for_loop("i1", n) << write(out) << element(to, 2)
        << " = row[i1];\n    }\n  }\n";
  return true;
}

// sum, mean, over all dims or some.
bool SmallFunctionWriter::add_sum(const Node& node) {
  const auto name = node.name();
  const bool of_all = name == "aten.sum" || name == "aten.mean", mean = name.starts_with("aten.mean");
  if (!of_all && name != "aten.sum.dim_IntList" && name != "aten.mean.dim") return false;
  const auto x = value_of(node.args[0]), out = value_of(node.results[0]);
  if (!is_number_tensor(x) || !is_number_tensor(out) || (*program_)[x].type.dtype != (*program_)[out].type.dtype)
    return false;
  const auto &from = (*program_)[x].type, &to = (*program_)[out].type;
  if (from.numel() > kMaxElements) return false;
  const auto ndim = from.sizes.size();
  std::vector<char> summed(ndim, of_all);
  bool keeps_dims = false;
  if (!of_all) {
    const auto *dims = constant_or_null(node.args[1]), *keep = constant_or_null(node.args[2]);
    if (!dims || !keep || !keep->isBool() || !(dims->isIntList() || dims->isNone())) return false;
    keeps_dims = keep->toBool();
    if (dims->isNone() || dims->toIntList().empty()) summed.assign(ndim, 1);
    if (dims->isIntList())
      for (const int64_t dim : dims->toIntList())
        if (ndim > 0) summed[static_cast<size_t>(dim < 0 ? dim + static_cast<int64_t>(ndim) : dim)] = 1;
  }
  std::string outer, inner, index;
  int64_t count = 1;
  size_t next = 0;  // dim of the result
  for (size_t d = 0; d < ndim; d++) {
    const auto variable = "i" + std::to_string(d);
    (summed[d] ? inner : outer) += for_loop(variable, from.sizes[d]);
    if (summed[d]) count *= from.sizes[d];
    if (!summed[d]) index += (index.empty() ? "" : " + ") + times(to.strides[next], variable);
    if (!summed[d] || keeps_dims) next++;
  }
  std::string source;
  for (size_t d = 0; d < ndim; d++)
    source += (source.empty() ? "" : " + ") + times(from.strides[d], "i" + std::to_string(d));
  text_ << "  " << outer << "{\n    double sum = 0;\n    " << inner << "sum += " << read(x) << "["
        << (source.empty() ? "0" : source) << "];\n    " << write(out) << "[" << (index.empty() ? "0" : index)
        << "] = (" << c_type(to.dtype) << ")(sum" << (mean ? " / " + std::to_string(count) + ".0" : "") << ");\n  }\n";
  return true;
}

bool SmallFunctionWriter::add_adam(const Node& node) {
  const auto name = node.name();
  const bool decoupled = name == "aten._fused_adamw_";
  if (!decoupled && name != "aten._fused_adam_") return false;
  const auto list = [&](size_t i) {
    const auto* values = std::get_if<ValueList>(&node.args[i]);
    return values ? *values : ValueList();
  };
  const auto parameters = list(0), gradients = list(1), averages = list(2), squares = list(3), steps = list(5);
  const auto *amsgrad = constant_or_null(node.args[11]), *maximize = constant_or_null(node.args[12]),
             *scale = constant_or_null(node.args[13]), *found_inf = constant_or_null(node.args[14]);
  if (!amsgrad || !maximize || !scale || !found_inf) return false;
  if (!amsgrad->isBool() || amsgrad->toBool() || !maximize->isBool() || !scale->isNone() || !found_inf->isNone())
    return false;
  const auto count = parameters.size();
  if (count == 0 || gradients.size() != count || averages.size() != count || squares.size() != count ||
      steps.size() != count)
    return false;
  int64_t elements = 0;
  for (size_t t = 0; t < count; t++) {
    for (const auto id : {parameters[t], gradients[t], averages[t], squares[t]})
      if (!is_number_tensor(id) || (*program_)[id].type.dtype != (*program_)[parameters[t]].type.dtype ||
          (*program_)[id].type.sizes != (*program_)[parameters[t]].type.sizes || !(*program_)[id].type.is_contiguous())
        return false;
    if (!is_number_tensor(steps[t]) || (*program_)[steps[t]].type.numel() != 1) return false;
    elements += (*program_)[parameters[t]].type.numel();
    if (elements > 4 * kMaxElements) return false;
  }
  const auto numbers_before = numbers_;
  std::string n[5];  // lr, beta1, beta2, weight decay, eps
  for (size_t i = 0; i < 5; i++) n[i] = number(node.args[6 + i]);
  if (std::any_of(std::begin(n), std::end(n), [](const auto& each) { return each.empty(); })) {
    numbers_ = numbers_before;
    return false;
  }
  text_ << "  {\n    const double lr = " << n[0] << ", beta1 = " << n[1] << ", beta2 = " << n[2] << ";\n";
  text_ << "    double step = -1, size = 0, root = 0;\n";  // equal steps have equal corrections
  for (size_t t = 0; t < count; t++) {
    const std::string type = c_type((*program_)[parameters[t]].type.dtype);
    const auto p = write(parameters[t]), g = read(gradients[t]), m = write(averages[t]), v = write(squares[t]);
    text_
        << "    if (" << read(steps[t]) << "[0] != step) {\n      step = " << read(steps[t])
        << "[0];\n      size = lr / (1 - std::pow(beta1, step));\n      root = std::sqrt(1 - std::pow(beta2, step));\n"
        << "    }\n    {\n      const " << type
        << " lr_ = lr, b1 = 1 - beta1, b2 = beta2, c2 = 1 - beta2, size_ = size, "
        << "root_ = root, decay = " << n[3] << ", eps = " << n[4] << ";\n      "
        << for_loop("i", (*program_)[parameters[t]].type.numel()) << "{\n        " << type << " p = " << p
        << "[i], g = " << (maximize->toBool() ? "-" : "") << g << "[i], m = " << m << "[i], v = " << v << "[i];\n"
        << (decoupled ? "        p -= lr_ * decay * p;\n" : "        g += decay * p;\n")
        << "        m += b1 * (g - m);\n        v = b2 * v + c2 * g * g;\n"
        << "        " << m << "[i] = m, " << v << "[i] = v;\n        " << p
        << "[i] = p - size_ * m / (std::sqrt(v) / root_ + eps);\n      }\n    }\n";
  }
  text_ << "  }\n";
  return true;
}

KernelSource SmallFunctionWriter::finish(const std::string& name) {
  KernelSource source;
  std::ostringstream text;
  text << "int64_t " << name << "_calls = 0;\nvoid " << name
       << "(void* const* operands, int64_t part, int64_t) {\n  if (part != 0) return;\n  __atomic_fetch_add(&" << name
       << "_calls, 1, __ATOMIC_RELAXED);\n";
  size_t next = 0;
  for (const bool written : {true, false})
    for (const auto& each : pointers_) {
      if (each.written != written) continue;
      const auto* type = c_type((*program_)[each.value].type.dtype);
      const auto* qualifier = written ? "" : "const ";
      text << "  " << qualifier << type << "* const " << each.name << " = (" << qualifier << type << "*)operands["
           << next++ << "];\n";
      (written ? source.outs : source.ins).push_back(each.value);
    }
  if (!numbers_.empty()) text << "  const double* const numbers = (const double*)operands[" << next << "];\n";
  text << text_.str() << "}\n";
  source.text = text.str();
  return source;
}

}  // namespace tessera::compiler::codegen
