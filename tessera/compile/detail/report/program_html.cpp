#include "tessera/compile/detail/report/program_html.h"

#include "tessera/compile/detail/ir/print.h"
#include "tessera/compile/detail/report/diff.h"
#include "tessera/compile/detail/report/html.h"

#include <algorithm>
#include <ostream>
#include <sstream>

namespace tessera::compiler {
namespace {

constexpr size_t kContextLines = 2;  // equal lines that are shown around a difference

// Line number and size are attributes: the style sheet shows them, and they are not copied with the text.
void write_line(std::ostream& out, const ProgramLines& program, size_t line, const char* tag) {
  const auto& text = program.lines[line];
  out << "<" << tag << " data-n=\"" << line + 1 << "\" data-b=\""
      << (program.bytes[line] < 0 ? "" : html::bytes(program.bytes[line])) << "\""
      << (text.starts_with("kernel ") ? " class=k" : "") << ">" << html::escaped(text) << "</" << tag << ">";
}

}  // namespace

ProgramLines::ProgramLines(const Program& program)
    : first_node(program.groups.size() + program.numbers.size() + program.kernels.size() + program.inputs.size()) {
  std::istringstream in(text_of(program));
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  bytes.assign(lines.size(), -1);
  const auto first = first_in_buffer(program);
  const auto add_bytes = [&](size_t line, ValueId id) {
    if (first[static_cast<size_t>(program.buffer_of(id))] != id) return;
    bytes[line] = std::max<int64_t>(bytes[line], 0) + program[id].type.bytes();
  };
  const auto first_input = first_node - program.inputs.size();
  for (size_t i = 0; i < program.inputs.size(); i++) add_bytes(first_input + i, program.inputs[i].value);
  for (size_t n = 0; n < program.nodes.size(); n++)
    program.nodes[n].each_result([&](ValueId id) { add_bytes(first_node + n, id); });
}

void write_program(std::ostream& out, const ProgramLines& program, const std::string& id) {
  out << "<pre class=program id=\"" << id << "\">";
  for (size_t i = 0; i < program.lines.size(); i++) write_line(out, program, i, "i");
  out << "</pre>\n";
}

void write_diff(std::ostream& out, const ProgramLines& before, const ProgramLines& after) {
  const auto lines = diff_lines(before.lines, after.lines);
  std::vector<char> shown(lines.size(), 0);
  for (size_t i = 0; i < lines.size(); i++) {
    if (lines[i].kind == DiffLine::Kind::Same) continue;
    for (size_t j = i - std::min(i, kContextLines); j <= std::min(i + kContextLines, lines.size() - 1); j++)
      shown[j] = 1;
  }
  out << "<pre class=\"program diff\">";
  size_t skipped = 0;
  const auto write_skipped = [&] {
    if (skipped > 0) out << "<b>&#8943; " << skipped << (skipped == 1 ? " line" : " lines") << "</b>";
    skipped = 0;
  };
  for (size_t i = 0; i < lines.size(); i++) {
    if (!shown[i]) {
      skipped++;
      continue;
    }
    write_skipped();
    const bool removed = lines[i].kind == DiffLine::Kind::Removed;
    write_line(out, removed ? before : after, lines[i].line,
               removed                                  ? "del"
               : lines[i].kind == DiffLine::Kind::Added ? "ins"
                                                        : "i");
  }
  write_skipped();
  out << "</pre>\n";
}

}  // namespace tessera::compiler
