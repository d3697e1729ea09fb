#include "tessera/cli/check_arguments.h"

#include "tessera/base/detail/nearest_names.h"
#include "tessera/base/error.h"

#include <charconv>
#include <map>

namespace tessera::cli {
namespace {

std::vector<std::string> flags_and_commands(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
    for (const auto& name : option->get_snames()) names.push_back("-" + name);
    for (const auto& name : option->get_fnames()) names.push_back("--" + name);
  }
  for (const auto* command : app.get_subcommands({})) names.push_back(command->get_name());
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

// "tessera train"
std::string full_name(const CLI::App& app) {
  return app.get_parent() ? full_name(*app.get_parent()) + " " + app.get_name() : app.get_name();
}

[[noreturn]] void unknown(const CLI::App& app, const std::string& kind, const std::string& word) {
  const auto near = did_you_mean(word, flags_and_commands(app));
  TESSERA_FAIL(UsageError, "unknown ", kind, " '", word, "' of ", full_name(app), "; ",
               near.empty() ? "see " + full_name(app) + " --help" : near);
}

bool has_positionals(const CLI::App& app) {
  const auto options = app.get_options();
  return std::any_of(options.begin(), options.end(), [](const auto* option) { return option->get_positional(); });
}

// The part of "--steps=3" or "-n3" that names the flag.
std::string flag_name(CLI::App& app, const std::string& word) {
  if (word.starts_with("--")) return word.substr(0, word.find('='));
  const auto short_name = word.substr(0, 2);
  return app.get_option_no_throw(short_name) ? short_name : word;
}

void check_flags(CLI::App& app, const std::vector<std::string>& words) {
  std::map<const CLI::Option*, std::string> given;  // with the name that was used
  for (size_t i = 0; i < words.size(); i++) {
    const auto& word = words[i];
    if (word == "--") return;
    if (word.size() < 2 || word[0] != '-') {
      if (app.get_allow_extras() || app.get_prefix_command()) return;  // the rest is for another program
      if (!has_positionals(app)) unknown(app, "argument", word);
      continue;
    }
    const auto name = flag_name(app, word);
    const auto* option = app.get_option_no_throw(name);
    if (!option) unknown(app, "flag", name);
    const bool many = option->get_expected_max() > 1;
    const auto [before, is_new] = given.emplace(option, name);
    TESSERA_CHECK(is_new || many, UsageError, name, " is given twice",
                  before->second == name ? "" : ", the first time as " + before->second, "; give it once to ",
                  full_name(app));
    const bool has_value = word != name;
    if (has_value || option->get_items_expected_min() == 0) continue;
    do i++;  // its value; a negative number starts with '-' too
    while (many && i + 1 < words.size() && !words[i + 1].starts_with("-"));
  }
}

}  // namespace

void check_arguments(CLI::App& app, const std::vector<std::string>& arguments) {
  if (arguments.empty() || app.get_subcommands({}).empty()) return check_flags(app, arguments);
  const auto& first = arguments[0];
  for (auto* command : app.get_subcommands({}))
    if (command->get_name() == first) {
      if (command->get_prefix_command()) return;
      return check_flags(*command, {arguments.begin() + 1, arguments.end()});
    }
  if (!app.get_option_no_throw(first)) unknown(app, first.starts_with("-") ? "flag" : "command", first);
}

std::vector<std::string> split_empty_values(std::vector<std::string> arguments) {
  for (size_t i = 0; i < arguments.size() && arguments[i] != "--"; i++) {
    auto& word = arguments[i];
    if (!word.starts_with("--") || word.find('=') != word.size() - 1) continue;
    word.pop_back();
    arguments.insert(arguments.begin() + static_cast<std::ptrdiff_t>(i) + 1, "");
    i++;
  }
  return arguments;
}

CLI::Validator in_range(double min, double max) {
  const auto text = c10::str("from ", static_cast<int64_t>(min), " to ", static_cast<int64_t>(max));
  return CLI::Validator(
      [min, max, text](std::string& word) {
        double value = 0;
        const auto* last = word.data() + word.size();
        const auto [end, error] = std::from_chars(word.data(), last, value);
        const bool good = error == std::errc() && end == last && value >= min && value <= max;
        return good ? std::string() : "'" + word + "' is not a number " + text;
      },
      text);
}

}  // namespace tessera::cli
