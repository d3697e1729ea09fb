#include "tessera/compile/detail/api/saved_step.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/api/compile_settings.h"
#include "tessera/compile/detail/api/step_file.h"

#include <bit>
#include <charconv>
#include <type_traits>

namespace tessera::compiler {
namespace {

// Both archives take the same fields in the same order. Text: "12 " for an integer, "3 abc " for a string.
class StepWriter {
 public:
  std::string text;
  template <class T>
  void number(const T& value) {
    text += std::to_string(static_cast<int64_t>(value)) + " ";
  }
  void string(const std::string& value) { number(value.size()), text += value + " "; }
  template <class T>
  void resize(const std::vector<T>& list) {
    number(list.size());
  }
};

class StepReader {
 public:
  explicit StepReader(const std::string& text) : text_(text) {}
  template <class T>
  void number(T& value) {
    int64_t read = 0;
    const auto* end = text_.data() + text_.size();
    const auto [after, error] = std::from_chars(text_.data() + at_, end, read);
    TESSERA_CHECK(error == std::errc() && after != end, InternalError, "a saved step has no number at byte ", at_);
    at_ = static_cast<size_t>(after - text_.data()) + 1;
    value = static_cast<T>(read);
  }
  void string(std::string& value) {
    size_t size = 0;
    number(size);
    TESSERA_CHECK(size < text_.size() - at_, InternalError, "a saved step has no ", size, " bytes at byte ", at_);
    value = text_.substr(at_, size);
    at_ += size + 1;
  }
  template <class T>
  void resize(std::vector<T>& list) {
    size_t size = 0;
    number(size);
    TESSERA_CHECK(size <= text_.size(), InternalError, "a saved step has a list of ", size, " items");
    list.resize(size);
  }

 private:
  const std::string& text_;
  size_t at_ = 0;
};

template <class Archive, class T>
void archive(Archive& a, T& value);

template <class Archive, class... Fields>
void archive_all(Archive& a, Fields&... fields) {
  (archive(a, fields), ...);
}

// Doubles by their bits: NaN and -0 too.
template <class Archive, class T>
void archive(Archive& a, T& value) {
  using V = std::remove_const_t<T>;
  if constexpr (std::is_same_v<V, std::string>) {
    a.string(value);
  } else if constexpr (std::is_same_v<V, double>) {
    auto bits = std::bit_cast<int64_t>(value);
    a.number(bits);
    if constexpr (!std::is_const_v<T>) value = std::bit_cast<double>(bits);
  } else if constexpr (std::is_integral_v<V> || std::is_enum_v<V>) {
    a.number(value);
  } else if constexpr (std::is_same_v<V, std::vector<bool>>) {
    a.resize(value);
    for (size_t i = 0; i < value.size(); i++) {
      bool each = value[i];
      a.number(each);
      if constexpr (!std::is_const_v<T>) value[i] = each;
    }
  } else if constexpr (
      requires { value.resize(0); } || requires { value.begin(); }) {
    a.resize(value);
    for (auto& each : value) archive(a, each);
  } else if constexpr (std::is_same_v<V, ThreadState>) {
    archive_all(a, value.modes, value.included_keys, value.excluded_keys, value.stream);
  } else if constexpr (std::is_same_v<V, SavedStep::NumberSource>) {
    archive_all(a, value.kind, value.index, value.group);
  } else if constexpr (std::is_same_v<V, SavedStep::GradientType>) {
    archive_all(a, value.parameter, value.type);
  } else if constexpr (std::is_same_v<V, ReturnedTensors::Saved>) {
    archive_all(a, value.defined, value.inference, value.requires_grad, value.is_view, value.is_base, value.creation,
                value.argument, value.result);
  } else if constexpr (std::is_same_v<V, TraceText::Constant>) {
    archive_all(a, value.node, value.argument, value.value);
  } else if constexpr (std::is_same_v<V, TraceText>) {
    archive_all(a, value.lines, value.constants);
  } else if constexpr (std::is_same_v<V, NumberUse>) {
    archive_all(a, value.node, value.argument, value.number, value.negated);
  } else {
    static_assert(std::is_same_v<V, PassReport>);
    archive_all(a, value.name, value.matched.times, value.matched.note, value.milliseconds);
  }
}

template <class Archive, class Step>
void archive_step(Archive& a, Step& s) {
  archive_all(a, s.call, s.settings, s.thread, s.numbers, s.constants, s.results, s.without_gradient, s.gradient_guards,
              s.result_leaves, s.trace, s.number_uses, s.returned_number_uses, s.returned_numbers, s.number_is_key,
              s.gradient_placeholders, s.sets_seed, s.draws_from_generators, s.seed, s.draws, s.report);
}

}  // namespace

void SavedStep::write(const std::string& path) const {
  StepWriter step;
  archive_step(step, *this);
  write_step_file(path, {{"library", library}, {"program", program}, {"step", step.text}});
}

SavedStep SavedStep::read(const std::string& path) {
  const auto sections = read_step_file(path);
  SavedStep saved;
  StepReader step(section(sections, "step"));
  archive_step(step, saved);
  saved.program = section(sections, "program");
  saved.library = section(sections, "library");
  return saved;
}

std::string describe_settings(const Settings& settings) {
  auto text = c10::str("numerics ", settings.numerics == Numerics::Fast ? "fast" : "strict", ", codegen ",
                       settings.codegen ? "on" : "off", ", passes");
  for (const auto& pass : settings.passes) text += " " + pass.name;
  return text;
}

}  // namespace tessera::compiler
