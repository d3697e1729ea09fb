#include "tessera/cli/train_flags.h"

#include "tessera/cli/train_config_file.h"
#include "tessera/train/detail/config_options.h"

namespace tessera::cli {
namespace {

template <class T>
constexpr const char* type_name() {
  if constexpr (std::is_same_v<T, std::string>) return "TEXT";
  return std::is_floating_point_v<T> ? "FLOAT" : std::is_signed_v<T> ? "INT" : "UINT";
}

}  // namespace

void TrainFlags::add_to(CLI::App& command) {
  file_flag_ = command.add_option("--config", file_, "TOML config file; flags override it");
  const train::TrainConfig defaults;
  train::visit_options(defaults, [&](const train::OptionInfo& info, const auto& value) {
    using T = std::remove_cvref_t<decltype(value)>;
    const std::string name(info.short_flag), key(info.key), dotted = "--" + key;
    const auto help = info.range ? c10::str(info.help, "; ", *info.range) : info.help;
    CLI::Option* option = nullptr;
    if constexpr (std::is_same_v<T, bool>) {
      std::string names = dotted + "{true}";
      if (!name.empty()) names += "," + name + "{true},--no-" + name.substr(2) + "{false}";
      option = command.add_flag(names, values_[key], help);
    } else {
      option = command.add_option((name.empty() ? "" : name + ",") + dotted, values_[key], help);
      option->default_str(train::option_text(value))->type_name(type_name<T>());
    }
    option->group(key.substr(0, key.find('.')));
    flags_[key] = option;
  });
}

train::TrainConfig TrainFlags::config() const {
  train::TrainConfig config;
  if (has_file()) read_train_config(config, file_);
  for (const auto& [key, text] : values_)
    if (has(key)) train::set_option(config, key, text);
  return config;
}

bool TrainFlags::has(const std::string& key) const { return flags_.at(key)->count() > 0; }

std::vector<std::string> flags_of(const train::TrainConfig& config) {
  std::map<std::string, std::string> default_text;
  const train::TrainConfig defaults;
  train::visit_options(defaults, [&](const train::OptionInfo& info, const auto& value) {
    default_text[info.key] = train::option_text(value);
  });
  std::vector<std::string> flags;
  train::visit_options(config, [&](const train::OptionInfo& info, const auto& value) {
    if (const auto text = train::option_text(value); default_text[info.key] != text)
      flags.push_back("--" + std::string(info.key) + "=" + text);
  });
  return flags;
}

}  // namespace tessera::cli
