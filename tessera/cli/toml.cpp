// Reads config files with toml++. Builds without toml++ have no_toml.cpp instead.
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/cli/train_config_file.h"

// Two repairs of toml++ 3.3, for files that are not TOML. It asserts, or lets clang assume, that a key follows "[";
// without assertions it looks and reports. It reaches TOML_UNREACHABLE for characters from U+00A1 on, outside of
// quotes; with `return false` they are not white space, and are reported.
#pragma push_macro("NDEBUG")
#undef NDEBUG
#define TOML_ASSERT(expr) static_assert(true)
#if __has_include(<toml++/impl/unicode.h>)
#include <toml++/impl/forward_declarations.h>
#pragma push_macro("TOML_UNREACHABLE")
#undef TOML_UNREACHABLE
#define TOML_UNREACHABLE return false
#include <toml++/impl/unicode.h>
#pragma pop_macro("TOML_UNREACHABLE")
#endif
#include <toml++/toml.h>
#pragma pop_macro("NDEBUG")

#include <charconv>

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

}  // namespace

void read_train_config(train::TrainConfig& config, const std::string& file) {
  const auto contents = read_text_file(file, "the config file");
  toml::table root;
  try {
    root = toml::parse(contents, file);
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
