#include "tessera/compile/detail/api/trace_text.h"

#include "tessera/base/detail/hash.h"
#include "tessera/compile/detail/ir/print.h"
#include "tessera/tracing/detail/number_input.h"
#include "tessera/tracing/op_mode.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <unordered_map>

namespace tessera::compiler {
namespace {

uint64_t hash_of(const at::Tensor& t) {
  const OpModesOff off;
  const auto bytes = t.detach().cpu().contiguous();
  return hash_bytes(bytes.const_data_ptr(), static_cast<size_t>(bytes.nbytes()));
}

// Names of values that two traces of one function have in common.
class ValueNames {
 public:
  explicit ValueNames(const Tracer::Result& traced) {
    for (const auto& input : traced.program.inputs) {
      const auto buffer = static_cast<size_t>(traced.program.buffer_of(input.value));
      std::ostringstream name;
      name << input.role << " ";
      const bool known = buffer < traced.owners.size() && traced.owners[buffer].defined();
      if (input.name.starts_with("constant ") && known)  // numbers that the step has written into a tensor
        name << "constant " << hash_of(traced.owners[buffer]);
      else if (input.role != Role::Captured)
        name << "\"" << input.name << "\"";
      else if (known)
        name << traced.owners[buffer].unsafeGetTensorImpl();
      names_[input.value] = name.str();
    }
  }
  void define(const Arg& result, size_t node, size_t number) {
    if (const auto* id = std::get_if<ValueId>(&result)) {
      if (*id != kNone) names_[*id] = c10::str("%", node, ".", number);
    } else if (const auto* list = std::get_if<ValueList>(&result)) {
      for (size_t i = 0; i < list->size(); i++)
        if ((*list)[i] != kNone) names_[(*list)[i]] = c10::str("%", node, ".", number, ".", i);
    }
  }
  std::string operator[](ValueId id) const {
    if (id == kNone) return "none";
    const auto found = names_.find(id);
    return found == names_.end() ? "?" : found->second;
  }

 private:
  std::unordered_map<ValueId, std::string> names_;
};

void write_argument(std::ostream& out, const Program& program, const ValueNames& names, const Arg& arg) {
  if (const auto* id = std::get_if<ValueId>(&arg)) {
    out << names[*id];
  } else if (const auto* list = std::get_if<ValueList>(&arg)) {
    out << "[";
    for (const auto id : *list) out << names[id] << " ";
    out << "]";
  } else {
    print_arg(out, program, arg);
  }
}

void write_types(std::ostream& out, const Program& program, const Arg& result) {
  if (const auto* id = std::get_if<ValueId>(&result)) {
    if (*id != kNone) out << " " << program[*id].type;
  } else if (const auto* list = std::get_if<ValueList>(&result)) {
    for (const auto id : *list)
      if (id != kNone) out << " " << program[id].type;
  }
}

bool same_bits(double a, double b) { return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b); }

std::string with_constants(const TraceText& text, size_t line) {
  auto shown = line < text.lines.size() ? text.lines[line] : "the end";
  for (const auto& each : text.constants)
    if (each.node == line)
      if (const auto at = shown.find('#'); at != std::string::npos) shown.replace(at, 1, c10::str(each.value));
  return shown;
}

}  // namespace

TraceText::TraceText(const Tracer::Result& traced, const ResultLeaves& returned) {
  const auto& program = traced.program;
  ValueNames names(traced);
  for (size_t n = 0; n < program.nodes.size(); n++) {
    const auto& node = program.nodes[n];
    std::ostringstream line;
    line << node.name() << "(";
    for (size_t a = 0; a < node.args.size(); a++) {
      if (a > 0) line << ", ";
      const auto* constant = std::get_if<c10::IValue>(&node.args[a]);
      if (constant && constant->isDouble()) {
        line << "#";
        constants.push_back({n, a, constant->toDouble()});
      } else {
        write_argument(line, program, names, node.args[a]);
      }
    }
    line << ")";
    for (size_t r = 0; r < node.results.size(); r++) {
      write_types(line, program, node.results[r]);
      names.define(node.results[r], n, r);
    }
    lines.push_back(line.str());
  }
  for (const auto& output : program.outputs)
    if (output.kind != Output::Kind::Kept)
      lines.push_back(c10::str(output.kind == Output::Kind::Return ? "return " : "gradient ", names[output.value], " ",
                               output.name));
  for (size_t i = 0; i < returned.numbers.size(); i++) {
    constants.push_back({lines.size(), i, returned.numbers[i]});
    lines.push_back(c10::str("return number ", i, ", #"));
  }
  if (!returned.others.empty()) lines.push_back("return" + returned.others);
}

std::string difference(const TraceText& now, const TraceText& before, const std::vector<NumberUse>& uses,
                       const std::vector<double>& numbers) {
  const auto describe = [&](size_t line) {
    return c10::str("op ", line, " is ", with_constants(now, line), ", it was ", with_constants(before, line));
  };
  const auto line = static_cast<size_t>(
      std::mismatch(now.lines.begin(),
                    now.lines.begin() + static_cast<ptrdiff_t>(std::min(now.lines.size(), before.lines.size())),
                    before.lines.begin())
          .first -
      now.lines.begin());
  const bool lines_differ = line < now.lines.size() || line < before.lines.size();
  auto use = uses.begin();
  for (size_t i = 0; i < now.constants.size() && i < before.constants.size(); i++) {
    const auto &a = now.constants[i], &b = before.constants[i];
    if (lines_differ && a.node >= line) break;
    const bool is_number = use != uses.end() && use->node == a.node && use->argument == a.argument;
    const auto wanted = is_number ? (use->negated ? -numbers[use->number] : numbers[use->number]) : b.value;
    use += is_number;
    if (!same_bits(a.value, wanted)) return describe(a.node);
  }
  return lines_differ ? describe(line) : "";
}

bool find_number_uses(const TraceText& real, const TraceText& positive, const TraceText& negative,
                      const std::vector<double>& numbers, std::vector<NumberUse>& uses) {
  if (real.lines != positive.lines || real.lines != negative.lines ||
      real.constants.size() != positive.constants.size() || real.constants.size() != negative.constants.size())
    return false;
  for (size_t i = 0; i < real.constants.size(); i++) {
    const auto& [node, argument, value] = real.constants[i];
    const auto mark = find_number_mark(positive.constants[i].value);
    if (!mark) {
      if (!same_bits(value, positive.constants[i].value) || !same_bits(value, negative.constants[i].value))
        return false;
      continue;
    }
    const auto other = find_number_mark(negative.constants[i].value);
    if (mark->index >= numbers.size() || !other || other->index != mark->index || other->negative == mark->negative)
      return false;
    const auto number = numbers[mark->index];
    if (!same_bits(value, mark->negative ? -number : number)) return false;
    uses.push_back({node, argument, mark->index, mark->negative});
  }
  return true;
}

}  // namespace tessera::compiler
