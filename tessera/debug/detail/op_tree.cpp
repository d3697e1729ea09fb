#include "tessera/debug/detail/op_tree.h"

#include "tessera/base/detail/module_name.h"

#include <sstream>

namespace tessera::detail {
namespace {

constexpr size_t kMostTensors = 8;  // a foreach op can have hundreds of tensors

std::string join(c10::ArrayRef<const TensorSpec*> specs) {
  std::ostringstream out;
  for (size_t i = 0; i < specs.size() && i < kMostTensors; i++)
    out << (i ? ", " : "") << (specs[i] ? specs[i]->brief() : "plain");
  if (specs.size() > kMostTensors) out << ", ... " << specs.size() - kMostTensors << " more";
  return out.str();
}

// "S(0)" on a mesh of one axis, "[S(0), R]" on others
std::string short_form(PlacementsRef placements) {
  return placements.size() == 1 ? tessera::to_string(placements[0]) : tessera::to_string(placements);
}

}  // namespace

void OpTree::add(What what, std::string text) {
  lines_.push_back({what, open_.size(), std::move(text), running_module()});
}

void OpTree::begin_op(const std::string& name, c10::ArrayRef<const TensorSpec*> in) {
  end_redistribution();  // the last one threw; no op runs inside a redistribution
  add(What::Op, name + "(" + join(in) + ")");
  lines_.back().op = name;
  open_.push_back(lines_.size() - 1);
}

void OpTree::end_op(c10::ArrayRef<const TensorSpec*> out) {
  end_redistribution();
  if (open_.empty()) return;  // the op began before the mode was entered
  if (!out.empty()) lines_[open_.back()].text += " -> " + join(out);
  open_.pop_back();
}

// The inputs of an op are reported one by one and then redistributed together with coalesced collectives. So the
// collectives are listed below the last input.
void OpTree::begin_redistribution(int tensor, const TensorSpec& from, const TensorSpec& to, bool is_explicit) {
  end_redistribution();
  add(What::Redistribution, c10::str("redistribute_input(", tensor, ", ", short_form(from.placements), "->",
                                     short_form(to.placements), ") ", is_explicit ? "explicit" : "implicit"));
  open_.push_back(lines_.size() - 1);
}

void OpTree::end_redistribution() {
  if (redistributing()) open_.pop_back();
}

void OpTree::collective(const comm::Record& record) {
  const char* family = record.family == comm::Family::Functional ? "c10d_functional::" : "c10d::";
  add(What::Collective, c10::str(family, record.name(), "(", record.group, ", ", record.bytes, " B)"));
}

void OpTree::clear() {
  lines_.clear();
  open_.clear();
}

std::string_view OpTree::current_op() const {
  for (auto line = open_.rbegin(); line != open_.rend(); ++line)
    if (lines_[*line].what == What::Op) return lines_[*line].op;
  return "";
}

std::string OpTree::to_string() const {
  std::string text;
  std::string_view module;
  auto add_line = [&](size_t depth, std::string_view line) {
    text.append(2 * depth, ' ');
    text += line;
    text += '\n';
  };
  for (const auto& line : lines_) {
    if (line.depth == 0 && line.module != module) {
      module = line.module;
      if (!module.empty()) add_line(0, "[nn.Mod] " + line.module);
    }
    add_line(line.depth + (module.empty() ? 0 : 1), line.text);
  }
  return text;
}

}  // namespace tessera::detail
