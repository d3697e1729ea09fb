#include "tessera/tensor_parallel/detail/style.h"

#include "tessera/base/error.h"
#include "tessera/tensor_parallel/detail/style_text.h"

#include <cstdlib>
#include <ostream>
#include <sstream>

namespace tessera {
namespace {

void print(std::ostream& out, const Placement& p) { out << p; }
void print(std::ostream& out, const Layouts& layouts) { out << layouts; }
void print(std::ostream& out, const Sections& sections) { out << sections; }
void print(std::ostream& out, int64_t number) { out << number; }
void print(std::ostream& out, bool flag) { out << (flag ? "true" : "false"); }

// `from` and `to` are the names of the fields in the text form of the style.
void check_layouts(const char* style, const Layouts& given, const Layouts& desired, const char* from, const char* to) {
  TESSERA_CHECK(given.size() == desired.size(), UsageError, style, ": ", from, " has ", given.size(), " layouts and ",
                to, " has ", desired.size(), "; write one layout per tensor in both, _ to leave a tensor unchanged");
  TESSERA_CHECK(!given.empty(), UsageError, style, ": no layouts; write ", from, " and ", to);
  for (size_t i = 0; i < given.size(); i++) {
    TESSERA_CHECK(given[i] || !desired[i], UsageError, style, ": ", to, " has ", *desired[i], " for tensor ", i,
                  ", but ", from, " has _; write its placement in ", from, ", or write _ in both");
    TESSERA_CHECK(!desired[i] || !desired[i]->is_partial() || desired[i] == given[i], UsageError, style, ": ", to,
                  " has ", *desired[i], " for tensor ", i,
                  "; a tensor cannot be redistributed to a partial placement, only to R or S(dim)");
  }
}

void check_block(const char* style, int64_t block) {
  TESSERA_CHECK(block >= 1, UsageError, style, ": block=", block, "; a block needs at least one feature");
}

void check_one(const ColwiseParallel& s) {
  check_block("colwise", s.block);
  TESSERA_CHECK(s.sections.count >= 1, UsageError, "colwise: sections=", s.sections, "; use at least one section");
  for (int64_t size : s.sections.sizes)
    TESSERA_CHECK(size >= 1, UsageError, "colwise: sections=", s.sections, "; each section needs at least one feature");
  TESSERA_CHECK(!s.output_layouts.is_partial(), UsageError, "colwise: output=", s.output_layouts,
                "; the output of a colwise module is sharded, not partial: write S(-1), R or S(dim)");
}
void check_one(const RowwiseParallel& s) { check_block("rowwise", s.block); }
void check_one(const SequenceParallel& s) {
  TESSERA_CHECK(std::abs(s.sequence_dim) < 64, UsageError, "sequence: dim=", s.sequence_dim,
                "; no tensor has that many dims");
}
void check_one(const PrepareModuleInput& s) {
  check_layouts("prepare_input", s.input_layouts, s.desired_input_layouts, "from", "to");
}
void check_one(const PrepareModuleOutput& s) {
  check_layouts("prepare_output", s.output_layouts, s.desired_output_layouts, "from", "to");
}
void check_one(const PrepareModuleInputOutput& s) {
  check_layouts("prepare_input_output", s.input_layouts, s.desired_input_layouts, "input_from", "input_to");
  check_layouts("prepare_input_output", s.output_layouts, s.desired_output_layouts, "output_from", "output_to");
}

}  // namespace

void check(const Style& style) {
  std::visit([](const auto& s) { check_one(s); }, style);
}

std::ostream& operator<<(std::ostream& out, const Layouts& layouts) {
  if (layouts.size() == 1 && layouts[0]) return out << *layouts[0];
  out << '[';
  for (size_t i = 0; i < layouts.size(); i++) out << (i ? ", " : "") << (layouts[i] ? to_string(*layouts[i]) : "_");
  return out << ']';
}

std::ostream& operator<<(std::ostream& out, const Sections& sections) {
  if (sections.sizes.empty()) return out << sections.count;
  return out << '[' << c10::Join(", ", sections.sizes) << ']';
}

std::ostream& operator<<(std::ostream& out, const Style& style) {
  std::visit(
      [&]<class S>(const S& s) {
        static const S defaults;
        bool any = false;
        out << detail::StyleText<S>::kName;
        detail::for_each_field<S>([&](const auto& field) {
          if (s.*field.member == defaults.*field.member) return;
          out << (any ? ", " : "(") << field.name << '=';
          print(out, s.*field.member);
          any = true;
        });
        if (any) out << ')';
      },
      style);
  return out;
}

std::string to_string(const Style& style) {
  std::ostringstream out;
  out << style;
  return out.str();
}

}  // namespace tessera
