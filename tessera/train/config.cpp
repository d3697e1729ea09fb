#include "tessera/train/config.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/detail/plan_file.h"

#include <charconv>
#include <cmath>
#include <limits>
#include <ostream>
#include <vector>

namespace tessera::train {
namespace {

// Whether all bytes form well-formed sequences: no overlong form, no surrogate, nothing above U+10FFFF.
bool is_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const auto byte = [&](size_t k) { return i + k < text.size() ? static_cast<unsigned char>(text[i + k]) : 0u; };
    const unsigned first = byte(0);
    const size_t length = first < 0x80 ? 1 : first >= 0xc2 && first < 0xe0 ? 2 : (first & 0xf0) == 0xe0 ? 3 : 4;
    if ((first >= 0x80 && first < 0xc2) || first > 0xf4) return false;
    for (size_t k = 1; k < length; k++)
      if ((byte(k) & 0xc0) != 0x80) return false;
    if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) > 0x9f) || (first == 0xf0 && byte(1) < 0x90) ||
        (first == 0xf4 && byte(1) > 0x8f))
      return false;
    i += length;
  }
  return true;
}

// "an integer from 1 to 1000000000", "a number above 0 and at most 1"
template <class T>
std::string expected(const OptionInfo& info) {
  const char* kind = std::is_integral_v<T> ? "an integer" : "a number";
  if (info.range) return c10::str(kind, " ", *info.range);
  return c10::str(kind, std::is_unsigned_v<T> ? " from 0 to 18446744073709551615" : "");
}

template <class T>
requires std::is_arithmetic_v<T>
void parse(const OptionInfo& info, const std::string& text, T& value) {
  T parsed{};
  const auto* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, parsed);
  TESSERA_CHECK(
      error == std::errc() && end == last && (!info.range || info.range->contains(static_cast<double>(parsed))),
      UsageError, info.key, " is '", text, "'; write ", expected<T>(info));
  value = parsed;
}
void parse(const OptionInfo& info, const std::string& text, bool& value) {
  TESSERA_CHECK(text == "true" || text == "false", UsageError, info.key, " is '", text, "'; write true or false");
  value = text == "true";
}
void parse(const OptionInfo& info, const std::string& text, std::string& value) {
  TESSERA_CHECK(is_utf8(text), UsageError, info.key, " is '", text,
                "', which is not UTF-8: a config file cannot have it; use another name");
  value = text;
}

// A basic string of TOML: quotes, backslashes and control characters are escaped.
std::string toml_text(const std::string& value) {
  std::string quoted = "\"";
  for (const char c : value) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\')
      quoted += std::string("\\") + c;
    else if (byte < 0x20 || byte == 0x7f)
      quoted += c10::str("\\u00", "0123456789abcdef"[byte / 16], "0123456789abcdef"[byte % 16]);
    else
      quoted += c;
  }
  return quoted + '"';
}
// TOML has signed integers only. set_option() reads a larger number from a string.
std::string toml_text(uint64_t value) {
  const auto text = option_text(value);
  return value <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) ? text : '"' + text + '"';
}
template <class T>
std::string toml_text(T value) {
  return option_text(value);
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const OptionRange& range) {
  const auto number = [](double value) {  // integers without ".0"
    return value == std::trunc(value) ? std::to_string(static_cast<int64_t>(value)) : option_text(value);
  };
  if (!range.above_min && !range.below_max) return out << "from " << number(range.min) << " to " << number(range.max);
  return out << (range.above_min ? "above " : "of at least ") << number(range.min) << " and "
             << (range.below_max ? "below " : "at most ") << number(range.max);
}

std::string option_text(const std::string& value) { return value; }
std::string option_text(bool value) { return value ? "true" : "false"; }
std::string option_text(int64_t value) { return std::to_string(value); }
std::string option_text(uint64_t value) { return std::to_string(value); }
std::string option_text(double value) {
  char text[32];
  const std::string written(text, std::to_chars(text, text + sizeof text, value).ptr);
  return written + (written.find_first_of(".en") == written.npos ? ".0" : "");
}

void set_option(TrainConfig& config, std::string_view key, const std::string& text) {
  bool found = false;
  std::vector<std::string> keys;
  visit_options(config, [&](const OptionInfo& info, auto& value) {
    keys.emplace_back(info.key);
    if (key != info.key) return;
    parse(info, text, value);
    found = true;
  });
  if (found) return;
  const auto near = did_you_mean(std::string(key), keys);
  TESSERA_FAIL(UsageError, "unknown option '", key, "'",
               near.empty() ? "; tessera train --print-config lists them" : "; " + near);
}

std::ostream& operator<<(std::ostream& out, const TrainConfig& config) {
  std::string_view table;
  visit_options(config, [&](const OptionInfo& info, const auto& value) {
    const std::string_view key(info.key), name = key.substr(0, key.find('.'));
    if (name != table) {
      out << (table.empty() ? "" : "\n") << '[' << name << "]\n";
      table = name;
    }
    out << key.substr(name.size() + 1) << " = " << toml_text(value) << "  # " << info.help << '\n';
  });
  return out;
}

Plan tensor_parallel_plan(const TrainConfig& config) {
  if (const auto& file = config.parallel.tp_plan; !file.empty()) return read_plan_file(file);
  return models::tensor_parallel_plan(
      model_config(config.model),
      {.sequence_parallel = config.parallel.sequence_parallel, .loss_parallel = config.parallel.loss_parallel});
}

}  // namespace tessera::train
