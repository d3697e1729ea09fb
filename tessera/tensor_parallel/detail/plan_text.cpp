#include "tessera/tensor_parallel/detail/plan_text.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/tensor_parallel/detail/style_text.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <ostream>
#include <set>
#include <sstream>
#include <utility>
#include <vector>

namespace tessera {
namespace {

constexpr std::string_view kMarks = "(),[]=#";  // these characters end a word

// Reads one line from left to right.
class Line {
 public:
  Line(std::string_view text, size_t number) : text_(text), number_(number) {}

  // Skips blanks and a comment.
  void skip_blanks() {
    while (at_ < text_.size() && is_blank(text_[at_])) at_++;
    if (at_ < text_.size() && text_[at_] == '#') at_ = text_.size();
  }
  bool at_end() {
    skip_blanks();
    return at_ == text_.size();
  }
  bool next_is(char c) {
    skip_blanks();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) {
    if (!next_is(c)) return false;
    at_++;
    return true;
  }
  void expect(char c, std::string_view allowed) {
    if (!take(c)) fail(allowed);
  }
  // The characters up to one of `stops`, a blank or the end. May be empty.
  std::string_view word(std::string_view stops) {
    skip_blanks();
    const size_t begin = at_;
    while (at_ < text_.size() && !is_blank(text_[at_]) && stops.find(text_[at_]) == stops.npos) at_++;
    return text_.substr(begin, at_ - begin);
  }
  // A word with its parentheses, if any: S(0, 64)
  std::string_view word_with_parentheses() {
    skip_blanks();
    const size_t begin = at_;
    word(kMarks);
    if (at_ < text_.size() && text_[at_] == '(') at_ = std::min(text_.find(')', at_), text_.size() - 1) + 1;
    return text_.substr(begin, at_ - begin);
  }
  std::optional<char> character() { return at_ < text_.size() ? std::optional(text_[at_++]) : std::nullopt; }

  size_t position() {
    skip_blanks();
    return at_;
  }
  // Throws an error about the word at `position`.
  [[noreturn]] void fail_at(size_t position, std::string_view allowed) const {
    auto found = text_.substr(position);
    if (size_t end = found.find_first_of(" \t\r,()[]=#", found.empty() ? 0 : 1); end != found.npos)
      found = found.substr(0, end);
    throw_at(position,
             found.empty() ? c10::str("the line ends; ", allowed) : c10::str("found '", found, "'; ", allowed));
  }
  [[noreturn]] void throw_at(size_t position, const std::string& message) const {
    TESSERA_FAIL(UsageError, "plan, line ", number_, ", column ", position + 1, ": ", message);
  }
  [[noreturn]] void fail(std::string_view allowed) { fail_at(position(), allowed); }

 private:
  static bool is_blank(char c) { return c == ' ' || c == '\t' || c == '\r'; }
  std::string_view text_;
  size_t number_, at_ = 0;
};

// Runs f, and adds the position to its errors.
template <class F>
auto with_position(Line& line, size_t position, F f) {
  try {
    return f();
  } catch (const UsageError& error) {
    line.throw_at(position, error.what_without_backtrace());
  }
}

// One overload per type of field. Each reads a value from the line, or throws an error with what it expects.

void read(Line& line, Placement& to) {
  const size_t position = line.position();
  const auto text = line.word_with_parentheses();
  to = with_position(line, position, [&] { return parse_placement(text); });
}

void read(Line& line, bool& to) {
  const size_t position = line.position();
  const auto word = line.word(kMarks);
  if (word != "true" && word != "false") line.fail_at(position, "write true or false");
  to = word == "true";
}

void read(Line& line, int64_t& to) {
  const size_t position = line.position();
  const auto word = line.word(kMarks);
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), to);
  const bool is_number = !word.empty() && error == std::errc() && end == word.data() + word.size();
  if (!is_number) line.fail_at(position, "write a number");
}

// [a, b, ...]; `read_one` takes an element.
template <class F>
void read_list(Line& line, F read_one) {
  line.expect('[', "write [");
  if (line.take(']')) return;
  do read_one();
  while (line.take(','));
  line.expect(']', "write , or ]");
}

void read(Line& line, Layouts& to) {
  to = {};
  auto one = [&] {
    if (line.take('_')) {
      to.each.emplace_back();
    } else {
      read(line, to.each.emplace_back(Placement()).value());
    }
  };
  line.next_is('[') ? read_list(line, one) : one();
}

void read(Line& line, Sections& to) {
  if (!line.next_is('[')) {
    to = {};
    return read(line, to.count);
  }
  std::vector<int64_t> sizes;
  read_list(line, [&] { read(line, sizes.emplace_back()); });
  to = Sections(std::move(sizes));
}

// name=value, ... up to the closing parenthesis
template <class S>
Style read_fields(Line& line) {
  S style;
  std::string names;
  detail::for_each_field<S>([&](const auto& field) { names += (names.empty() ? "" : ", ") + std::string(field.name); });
  const auto allowed = c10::str("parameters of ", detail::StyleText<S>::kName, " are ", names);
  std::set<std::string_view> given;
  while (!line.next_is(')')) {
    const size_t position = line.position();
    const auto name = line.word(kMarks);
    bool known = false;
    detail::for_each_field<S>([&](const auto& field) {
      if (name != field.name) return;
      known = true;
      if (!given.insert(name).second) line.throw_at(position, c10::str("'", name, "' is given twice"));
      line.expect('=', "write =");
      read(line, style.*field.member);
    });
    if (!known) line.fail_at(position, allowed);
    if (!line.take(',') && !line.next_is(')')) line.fail("write , or )");
  }
  line.expect(')', "write )");
  return style;
}

// Reads the parameters of the style with this name.
template <size_t I = 0>
Style read_style_named(Line& line, size_t position, std::string_view name, std::vector<std::string> others = {}) {
  if constexpr (I < std::variant_size_v<Style>) {
    using S = std::variant_alternative_t<I, Style>;
    if (name == detail::StyleText<S>::kName) return line.take('(') ? read_fields<S>(line) : Style(S{});
    others.emplace_back(detail::StyleText<S>::kName);
    return read_style_named<I + 1>(line, position, name, std::move(others));
  } else {
    const auto near = did_you_mean(std::string(name), others);
    line.fail_at(position, near + (near.empty() ? "" : " ") + "styles are " + c10::Join(", ", others));
  }
}

Style read_style(Line& line) {
  const size_t position = line.position();
  auto style = read_style_named(line, position, line.word(kMarks));
  with_position(line, position, [&] { check(style); });
  return style;
}

// (letter after the backslash, character)
constexpr std::pair<char, char> kEscapes[] = {{'"', '"'}, {'\\', '\\'}, {'n', '\n'}, {'r', '\r'}};

std::string read_quoted(Line& line) {
  const size_t position = line.position();
  std::string text;
  line.expect('"', "write \"");
  while (auto c = line.character()) {
    if (c == '"') return text;
    if (c == '\\') {
      const auto letter = line.character();
      const auto* escape = std::ranges::find(kEscapes, letter, &std::pair<char, char>::first);
      if (escape == std::end(kEscapes)) line.throw_at(position, "in quotes a \\ is followed by \", \\, n or r");
      c = escape->second;
    }
    text += *c;
  }
  line.throw_at(position, "the quote is not closed; write \" after the pattern");
}

std::string in_quotes(std::string_view pattern) {
  if (!pattern.empty() && pattern.find_first_of(" \t\r\n=#\"") == pattern.npos) return std::string(pattern);
  std::string text = "\"";
  for (char c : pattern) {
    const auto* escape = std::ranges::find(kEscapes, c, &std::pair<char, char>::second);
    if (escape == std::end(kEscapes)) {
      text += c;
    } else {
      text += {'\\', escape->first};
    }
  }
  return text + '"';
}

}  // namespace

Style parse_style(std::string_view text) {
  Line line(text, 1);
  auto style = read_style(line);
  if (!line.at_end()) line.fail("nothing follows a style");
  return style;
}

Plan parse_plan(std::string_view text) {
  Plan plan;
  std::map<std::string, size_t> lines;  // pattern -> line
  size_t number = 0;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    Line line(text.substr(0, end), ++number);
    text.remove_prefix(end == text.npos ? text.size() : end + 1);
    if (line.at_end()) continue;

    const size_t position = line.position();
    auto pattern = line.next_is('"') ? read_quoted(line) : std::string(line.word("=#\""));
    if (line.position() == position) line.fail("write a pattern; \"\" is the root module");
    const auto [before, is_new] = lines.emplace(pattern, number);
    if (!is_new) line.throw_at(position, c10::str("'", pattern, "' already has a style, in line ", before->second));
    line.expect('=', "write = and a style");
    auto style = read_style(line);
    if (!line.at_end()) line.fail("nothing but a # comment follows a style");
    plan.add(std::move(pattern), std::move(style));
  }
  return plan;
}

std::string to_string(const Plan& plan) {
  std::ostringstream out;
  out << plan;
  return out.str();
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) {
  size_t width = 0;
  for (const auto& entry : plan) width = std::max(width, in_quotes(entry.pattern).size());
  for (const auto& entry : plan) {
    auto pattern = in_quotes(entry.pattern);
    pattern.resize(width, ' ');
    out << pattern << " = " << to_string(entry.style) << '\n';
  }
  return out;
}

}  // namespace tessera
