#include "tessera/compile/detail/codegen/kernel_source.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <sstream>

namespace tessera::compiler::codegen {
namespace {

template <class T>
std::string float_literal(T number, const char* suffix) {
  if (std::isnan(number)) return std::string("__builtin_nan") + suffix + "(\"\")";
  if (std::isinf(number)) return std::string(number < 0 ? "(-" : "(") + "__builtin_inf" + suffix + "())";
  char text[40];
  std::string shown(text, std::to_chars(text, text + sizeof text, number).ptr);
  if (shown.find_first_of(".e") == std::string::npos) shown += ".0";
  shown += suffix;
  return shown[0] == '-' ? "(" + shown + ")" : shown;
}

class KernelWriter {
 public:
  KernelWriter(const Program& program, const std::function<bool(int32_t)>& is_local)
      : program_(program), is_local_(is_local) {}

  KernelSource write(const std::string& name, const std::vector<std::vector<Assignment>>& loops) {
    for (const auto& body : loops)
      for (const auto& each : body)
        if (!is_local_(program_.buffer_of(each.into))) pointer(each.into, source_.outs, "out");
    for (const auto& body : loops) write_loop(body);
    std::ostringstream text;
    text << "int64_t " << name << "_calls = 0;\nvoid " << name
         << "(void* const* operands, int64_t part, int64_t parts) {\n  if (part == 0) __atomic_fetch_add(&" << name
         << "_calls, 1, __ATOMIC_RELAXED);\n";
    size_t next = 0;
    const auto declare = [&](const ValueList& list, const char* qualifier, const char* stem) {
      for (size_t i = 0; i < list.size(); i++) {
        const auto* type = c_type(program_[list[i]].type.dtype);
        text << "  " << qualifier << type << "* __restrict " << stem << i << " = (" << qualifier << type
             << "*)operands[" << next++ << "];\n";
      }
    };
    declare(source_.outs, "", "out");
    declare(source_.ins, "const ", "in");
    text << loops_.str() << "}\n";
    source_.text = text.str();
    return std::move(source_);
  }

 private:
  // The name of the pointer to a value's memory; declares it on first use.
  const std::string& pointer(ValueId id, ValueList& list, const char* stem) {
    const auto [at, is_new] = pointers_.try_emplace(location_of(program_, id));
    if (is_new) {
      at->second = stem + std::to_string(list.size());
      list.push_back(id);
    }
    return at->second;
  }

  void write_loop(const std::vector<Assignment>& body) {
    const auto cat = std::find_if(body.begin(), body.end(), [](const auto& each) { return !each.cat_inputs.empty(); });
    if (cat == body.end()) return write_part(body, kNone, program_[body[0].into].type.numel(), 0);
    int64_t offset = 0;
    for (const auto input : cat->cat_inputs) {
      const auto n = program_[input].type.numel();
      if (n > 0) write_part(body, input, n, offset);
      offset += n;
    }
  }

  // The loop over elements `offset` to `offset + n`, which come from `cat_input` if there is a concatenation.
  void write_part(const std::vector<Assignment>& body, ValueId cat_input, int64_t n, int64_t offset) {
    const std::string index = offset == 0 ? "[i]" : "[i + " + std::to_string(offset) + "]";
    std::map<MemoryLocation, std::string> now;  // the variable with the current element of each location
    std::vector<ValueId> written;
    int variables = 0;
    loops_ << "  for (int64_t i = " << n << " * part / parts, end = " << n
           << " * (part + 1) / parts; i < end; i++) {\n";
    const auto define = [&](ValueId id, const std::string& expression) -> const std::string& {
      auto& variable = now[location_of(program_, id)] = "v" + std::to_string(variables++);
      loops_ << "    const " << c_type(program_[id].type.dtype) << " " << variable << " = " << expression << ";\n";
      return variable;
    };
    const auto read = [&](ValueId id) {
      const auto found = now.find(location_of(program_, id));
      return found != now.end() ? found->second : define(id, pointer(id, source_.ins, "in") + index);
    };
    for (const auto& each : body) {
      if (!each.cat_inputs.empty())
        define(each.into, pointer(cat_input, source_.ins, "in") + "[i]");
      else
        define(each.into, formula_text(each, program_[each.into].type.dtype, read));
      if (!is_local_(program_.buffer_of(each.into))) written.push_back(each.into);
    }
    std::map<MemoryLocation, char> stored;
    for (const auto id : written)
      if (stored.try_emplace(location_of(program_, id)).second)
        loops_ << "    " << pointers_.at(location_of(program_, id)) << index << " = "
               << now.at(location_of(program_, id)) << ";\n";
    loops_ << "  }\n";
  }

  const Program& program_;
  const std::function<bool(int32_t)>& is_local_;
  KernelSource source_;
  std::map<MemoryLocation, std::string> pointers_;
  std::ostringstream loops_;
};

}  // namespace

const char* c_type(c10::ScalarType dtype) { return dtype == c10::kFloat ? "float" : "double"; }

std::string constant_literal(const c10::IValue& number, c10::ScalarType dtype) {
  if (dtype == c10::kDouble) return float_literal(number.toScalar().toDouble(), "");
  return float_literal(number.isInt() ? static_cast<float>(number.toInt()) : static_cast<float>(number.toDouble()),
                       "f");
}

std::string formula_text(const Assignment& assignment, c10::ScalarType dtype,
                         const std::function<std::string(ValueId)>& read) {
  std::string text;
  for (const char* c = assignment.formula; *c; c++) {
    if (*c != '$') {
      text += *c;
      continue;
    }
    const auto& operand = assignment.operands[static_cast<size_t>(*++c - '0')];
    if (const auto* id = std::get_if<ValueId>(&operand))
      text += read(*id);
    else
      text += constant_literal(std::get<c10::IValue>(operand), dtype);
  }
  return text;
}

KernelSource write_kernel(const Program& program, const std::string& name,
                          const std::vector<std::vector<Assignment>>& loops,
                          const std::function<bool(int32_t)>& is_local) {
  return KernelWriter(program, is_local).write(name, loops);
}

}  // namespace tessera::compiler::codegen
