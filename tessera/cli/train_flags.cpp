#include "tessera/cli/train_flags.h"

#include "tessera/cli/train_config_file.h"
#include "tessera/train/detail/config_options.h"

namespace tessera::cli {

void TrainFlags::add_to(CLI::App& command) {
  command.add_option("--config", file_, "TOML config file; flags override it");
  const train::TrainConfig defaults;
  train::visit_options(defaults, [&](const train::OptionInfo& info, const auto& value) {
    const std::string name(info.short_flag), key(info.key), dotted = "--" + key;
    CLI::Option* option = nullptr;
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(value)>, bool>) {
      std::string names = dotted + "{true}";
      if (!name.empty()) names += "," + name + "{true},--no-" + name.substr(2) + "{false}";
      option = command.add_flag(names, values_[key], info.help);
    } else {
      option = command.add_option((name.empty() ? "" : name + ",") + dotted, values_[key], info.help);
      option->default_str(train::option_text(value));
    }
    option->group(key.substr(0, key.find('.')));
  });
}

train::TrainConfig TrainFlags::config() const {
  train::TrainConfig config;
  if (!file_.empty()) read_train_config(config, file_);
  for (const auto& [key, text] : values_)
    if (!text.empty()) train::set_option(config, key, text);
  return config;
}

bool TrainFlags::has(const std::string& key) const { return !values_.at(key).empty(); }

}  // namespace tessera::cli
