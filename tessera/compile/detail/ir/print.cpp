#include "tessera/compile/detail/ir/print.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/ir/constant_text.h"
#include "tessera/compile/detail/ir/op_table.h"

#include <algorithm>
#include <charconv>
#include <ostream>
#include <sstream>

namespace tessera::compiler {
namespace {

constexpr const char* kOutputs[] = {"return", "gradient", "kept"};

// Prints the shortest text that parses to the same double, with a decimal point, so that it does not parse as an
// integer.
void print_double(std::ostream& out, double number) {
  char text[40];
  const auto end = std::to_chars(text, text + sizeof text, number).ptr;
  std::string_view shown(text, static_cast<size_t>(end - text));
  out << shown;
  if (shown.find_first_of(".einf") == std::string_view::npos) out << ".0";
}

// Quoted and escaped, on one line.
void print_quoted(std::ostream& out, const std::string& text) {
  out << '"';
  for (const char c : text) {
    if (c == '\n')
      out << "\\n";
    else if (c == '"' || c == '\\')
      out << '\\' << c;
    else
      out << c;
  }
  out << '"';
}

template <class List, class F>
void print_bracketed(std::ostream& out, const List& list, F each) {
  out << "[";
  bool first = true;
  for (const auto& item : list) {
    if (!first) out << ", ";
    first = false;
    each(item);
  }
  out << "]";
}

void print_constant(std::ostream& out, const c10::IValue& value) {
  if (value.isNone()) {
    out << "none";
  } else if (value.isBool()) {
    out << (value.toBool() ? "true" : "false");
  } else if (value.isInt()) {
    out << value.toInt();
  } else if (value.isDouble()) {
    print_double(out, value.toDouble());
  } else if (value.isString()) {
    print_quoted(out, value.toStringRef());
  } else if (value.isDevice()) {
    out << "device(\"" << value.toDevice() << "\")";
  } else if (value.isGenerator()) {
    out << "generator";
  } else if (value.isList()) {
    print_bracketed(out, value.toListRef(), [&](const c10::IValue& item) { print_constant(out, item); });
  } else if (value.isComplexDouble()) {
    out << "complex(";
    print_double(out, value.toComplexDouble().real());
    out << ", ";
    print_double(out, value.toComplexDouble().imag());
    out << ")";
  } else {
    TESSERA_FAIL(UsageError, "compile: a program cannot contain an argument of type ", value.tagKind());
  }
}

void print_value(std::ostream& out, ValueId id) {
  if (id == kNone)
    out << "undefined";
  else
    out << "%" << id;
}

void print_definition(std::ostream& out, const Program& program, const std::vector<ValueId>& first, ValueId id) {
  print_value(out, id);
  if (id == kNone) return;
  const auto& value = program[id];
  out << ": " << value.type;
  if (value.batch_dim == Value::kBatchReduced) out << " batch reduced";
  if (value.batch_dim >= 0) out << " batch " << value.batch_dim;
  const auto base = first[static_cast<size_t>(value.buffer)];
  if (base != id) {
    out << " in %" << base;
    if (value.offset != 0) out << " + " << value.offset;
  }
}

void print_node(std::ostream& out, const Program& program, const std::vector<ValueId>& first, const Node& node) {
  const char* separator = "";
  for (const auto& result : node.results) {
    out << separator;
    separator = ", ";
    if (const auto* id = std::get_if<ValueId>(&result))
      print_definition(out, program, first, *id);
    else if (const auto* list = std::get_if<ValueList>(&result))
      print_bracketed(out, *list, [&](ValueId each) { print_definition(out, program, first, each); });
    else
      print_arg(out, program, result);
  }
  out << (node.results.empty() ? "" : " = ") << node.name() << "(";
  for (size_t i = 0; i < node.args.size(); i++) {
    out << (i ? ", " : "");
    print_arg(out, program, node.args[i], writes_argument(node.op, i));
  }
  out << ")";
  if (!node.module.empty()) out << "  # " << node.module;
}

}  // namespace

std::vector<ValueId> first_in_buffer(const Program& program) {
  std::vector<ValueId> first(static_cast<size_t>(program.buffers), kNone);
  const auto note = [&](ValueId id) {
    auto& at = first[static_cast<size_t>(program.buffer_of(id))];
    if (at == kNone) at = id;
  };
  for (const auto& input : program.inputs) note(input.value);
  for (const auto& node : program.nodes) node.each_result(note);
  return first;
}

void print_arg(std::ostream& out, const Program& program, const Arg& arg, bool written) {
  const char* mark = written ? "!" : "";
  if (const auto* constant = std::get_if<c10::IValue>(&arg)) {
    print_constant(out, *constant);
  } else if (const auto* id = std::get_if<ValueId>(&arg)) {
    print_value(out, *id);
    out << mark;
  } else if (const auto* list = std::get_if<ValueList>(&arg)) {
    print_bracketed(out, *list, [&](ValueId each) {
      print_value(out, each);
      out << mark;
    });
  } else if (const auto* scalar = std::get_if<RuntimeScalar>(&arg)) {
    out << (scalar->negated ? "-$" : "$") << program.numbers[static_cast<size_t>(scalar->number)].name;
    if (scalar->plus != 0) out << " + " << scalar->plus;
  } else {
    out << "@" << program.groups[static_cast<size_t>(std::get<GroupName>(arg).group)].name;
  }
}

void print_node(std::ostream& out, const Program& program, const Node& node) {
  print_node(out, program, first_in_buffer(program), node);
}

void print_declarations(std::ostream& out, const Program& program, bool sources) {
  const auto first = first_in_buffer(program);
  for (const auto& group : program.groups) {
    out << "group @" << group.name << " ";
    print_bracketed(out, group.ranks, [&](int64_t rank) { out << rank; });
    if (group.rank >= 0) out << " rank " << group.rank;
    out << "\n";
  }
  for (const auto& number : program.numbers) out << "number $" << number.name << "\n";
  for (const auto& [name, source] : program.kernels) {
    out << "kernel " << name << " ";
    print_quoted(out, sources ? source : "");
    out << "\n";
  }
  for (const auto& input : program.inputs) {
    out << "input ";
    print_definition(out, program, first, input.value);
    out << " " << input.role << " ";
    print_quoted(out, input.name);
    if (const auto elements = elements_of(input.constant)) {
      out << " = ";
      print_bracketed(out, *elements, [&](double element) { print_double(out, element); });
    }
    out << "\n";
  }
}

void print_outputs(std::ostream& out, const Program& program) {
  for (const auto& output : program.outputs) {
    out << kOutputs[static_cast<size_t>(output.kind)] << " ";
    print_value(out, output.value);
    if (!output.name.empty()) {
      out << " ";
      print_quoted(out, output.name);
    }
    out << "\n";
  }
}

std::ostream& operator<<(std::ostream& out, const Program& program) {
  print_declarations(out, program);
  const auto first = first_in_buffer(program);
  for (const auto& node : program.nodes) {
    print_node(out, program, first, node);
    out << "\n";
  }
  print_outputs(out, program);
  return out;
}

std::string text_of(const Program& program) {
  std::ostringstream out;
  out << program;
  return out.str();
}

}  // namespace tessera::compiler
