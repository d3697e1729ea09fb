// Reads config files with toml++. Builds without toml++ have no_toml.cpp instead.
#include "tessera/base/error.h"
#include "tessera/cli/train_config_file.h"

// toml++ 3.3 asserts, or lets the compiler assume, that a key follows "[". Without that it looks and reports.
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define TOML_ASSERT(expr) static_assert(true)
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

#include <charconv>
#include <fstream>
#include <iterator>

namespace tessera::cli {
namespace {

std::string number_text(double value) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};
}

std::string text_of(const toml::node& node, const std::string& where) {
  if (const auto* text = node.as_string()) return text->get();
  if (const auto* number = node.as_integer()) return std::to_string(number->get());
  if (const auto* number = node.as_floating_point()) return number_text(number->get());
  if (const auto* boolean = node.as_boolean()) return boolean->get() ? "true" : "false";
  TESSERA_FAIL(UsageError, where, " must be a string, a number, true or false");
}

// The line of the first character outside of strings and comments that TOML does not have there; 0 if there is none.
// toml++ 3.3 has undefined behaviour for such characters from U+00A1 on (`default: TOML_UNREACHABLE`).
int64_t line_of_wrong_character(std::string_view text) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  int64_t line = 1;
  std::string_view end;  // of the string or comment that `i` is in; empty: outside
  for (size_t i = 0; i < text.size(); i++) {
    const auto rest = text.substr(i);
    line += text[i] == '\n';
    if (end.empty()) {
      if (static_cast<unsigned char>(text[i]) >= 0x80) return line;
      for (const std::string_view quotes : {"\"\"\"", "'''", "\"", "'"})
        if (end.empty() && rest.starts_with(quotes)) end = quotes;
      i += end.empty() ? 0 : end.size() - 1;
      if (text[i] == '#') end = "\n";
    } else if (rest.starts_with(end)) {
      i += end.size() - 1;
      for (int more = 0; more < 2 && end.size() == 3 && text.substr(i + 1).starts_with(end[0]); more++)
        i++;  // """a"""""
      end = {};
    } else if (text[i] == '\\' && end[0] == '"') {
      i++;
      line += i < text.size() && text[i] == '\n';
    } else if (text[i] == '\n' && end.size() == 1) {  // toml++ reports it
      end = {};
    }
  }
  return 0;
}

}  // namespace

void read_train_config(train::TrainConfig& config, const std::string& file) {
  toml::table root;
  std::ifstream in(file, std::ios::binary);
  const auto wrong = line_of_wrong_character(std::string(std::istreambuf_iterator<char>(in), {}));
  TESSERA_CHECK(wrong == 0, UsageError, "cannot read ", file, ", line ", wrong,
                ": a character that is not ASCII is outside of quotes; write keys and numbers in ASCII");
  try {
    root = toml::parse_file(file);
  } catch (const toml::parse_error& error) {
    TESSERA_FAIL(UsageError, "cannot read ", file, ", line ", error.source().begin.line, ": ", error.description());
  }
  for (const auto& [table_name, node] : root) {
    const auto* table = node.as_table();
    TESSERA_CHECK(table, UsageError, file, ", line ", node.source().begin.line, ": '", table_name.str(),
                  "' is not in a table; write it below [model], [data], [training] or another table");
    for (const auto& [name, value] : *table) {
      const auto where = c10::str(file, ", line ", value.source().begin.line);
      const auto key = c10::str(table_name.str(), ".", name.str());
      const auto text = text_of(value, where + ": " + key);
      try {
        train::set_option(config, key, text);
      } catch (const UsageError& error) {
        TESSERA_FAIL(UsageError, where, ": ", error.what_without_backtrace());
      }
    }
  }
}

}  // namespace tessera::cli
