#include "tessera/train/config.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/detail/plan_file.h"

#include <charconv>
#include <ostream>
#include <vector>

namespace tessera::train {
namespace {

template <class T>
requires std::is_arithmetic_v<T> T parse_number(std::string_view key, const std::string& text) {
  T value{};
  const auto* last = text.data() + text.size();
  const auto [end, error] = std::from_chars(text.data(), last, value);
  TESSERA_CHECK(error == std::errc() && end == last, UsageError, key, " is '", text, "'; write ",
                std::is_integral_v<T> ? (std::is_signed_v<T> ? "an integer" : "an integer of at least 0") : "a number");
  return value;
}

void parse(std::string_view, const std::string& text, std::string& value) { value = text; }
void parse(std::string_view key, const std::string& text, int64_t& value) { value = parse_number<int64_t>(key, text); }
void parse(std::string_view key, const std::string& text, uint64_t& value) {
  value = parse_number<uint64_t>(key, text);
}
void parse(std::string_view key, const std::string& text, double& value) { value = parse_number<double>(key, text); }
void parse(std::string_view key, const std::string& text, bool& value) {
  TESSERA_CHECK(text == "true" || text == "false", UsageError, key, " is '", text, "'; write true or false");
  value = text == "true";
}

std::string toml_text(const std::string& value) {
  std::string quoted = "\"";
  for (const char c : value) quoted += (c == '"' || c == '\\' ? std::string("\\") : std::string()) + c;
  return quoted + '"';
}
template <class T>
std::string toml_text(T value) {
  return option_text(value);
}

}  // namespace

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
    parse(key, text, value);
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
