#include "tessera/train/detail/resume_changes.h"

#include "tessera/base/error.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/detail/train_step.h"

#include <map>
#include <sstream>
#include <string_view>

namespace tessera::train {
namespace {

using OptionTexts = std::map<std::string, std::string>;

// How fast a step is, and where: not what it computes.
constexpr std::string_view kNotCompared[] = {"data.prefetch", "training.device", "training.compile",
                                             "training.activation_checkpoint"};

bool is_compared(std::string_view key) {
  for (const auto name : kNotCompared)
    if (key == name) return false;
  return key.starts_with("data.") || key.starts_with("training.") || key.starts_with("optimizer.") ||
         key.starts_with("parallel.");
}

OptionTexts options_of(const TrainConfig& config) {
  OptionTexts texts;
  visit_options(config, [&](const OptionInfo& info, const auto& value) {
    if (is_compared(info.key)) texts[info.key] = option_text(value);
  });
  return texts;
}

OptionTexts parse_options(const std::string& text) {
  OptionTexts texts;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (const auto end = line.find('='); end != std::string::npos) texts[line.substr(0, end)] = line.substr(end + 1);
  return texts;
}

// The config of this run with the saved options that this version knows.
TrainConfig saved_config(const OptionTexts& saved, TrainConfig config) {
  for (const auto& [key, text] : saved) try {
      set_option(config, key, text);
    } catch (const UsageError&) {  // of another version
    }
  return config;
}

double learning_rate(const TrainConfig& config, int64_t steps_made) {
  return config.optimizer.lr * learning_rate_factor(config.optimizer, config.training.steps)(steps_made);
}

int64_t number_in(const dcp::Values& values, const std::string& name) {
  const auto found = values.find(name);
  const auto* number = found == values.end() ? nullptr : std::get_if<int64_t>(&found->second);
  return number ? *number : 0;
}

// What a different option changes.
std::string effect_of(const std::string& key, const dcp::Values& saved, const TrainConfig& before,
                      const TrainConfig& now) {
  const int64_t step = number_in(saved, "step"), position = number_in(saved, "position");
  if (key == "training.batch")
    return c10::str("the data continue after sample ", position, ", and later batches have other samples");
  if (key == "training.seed")
    return c10::str("the order of the data after sample ", position, " is that of the new seed");
  if (key.starts_with("data."))
    return c10::str("sample ", position, " of the new data is next, which is not what follows in the old data");
  if (key == "training.steps" || key.starts_with("optimizer.")) {
    const double was = learning_rate(before, step), is = learning_rate(now, step);
    if (was != is)
      return c10::str("the learning rate of step ", step + 1, " is ", option_text(is), ", and would have been ",
                      option_text(was));
    return key == "training.steps" ? "the schedule ends at another step" : "later steps update differently";
  }
  const bool invariant = before.training.numerics == "invariant" && now.training.numerics == "invariant";
  if (invariant && (key == "training.accumulate" || key.starts_with("parallel.")))
    return "the same samples and the same bits: numerics are invariant";
  if (key == "training.accumulate" || key == "training.precision" || key == "training.numerics" ||
      key == "training.virtual_shards" || key.starts_with("parallel."))
    return "the same samples; sums are rounded differently";
  return "later steps differ";
}

}  // namespace

std::string saved_options(const TrainConfig& config) {
  std::string text;
  for (const auto& [key, value] : options_of(config)) text += key + "=" + value + "\n";
  return text;
}

std::vector<std::string> resume_changes(const dcp::Values& values, const TrainConfig& config) {
  const auto found = values.find("options");
  const auto* text = found == values.end() ? nullptr : std::get_if<std::string>(&found->second);
  if (!text) return {};
  const auto saved = parse_options(*text);
  const auto before = saved_config(saved, config);
  std::vector<std::string> changes;
  for (const auto& [key, value] : options_of(config)) {
    const auto was = saved.find(key);
    if (was == saved.end() || was->second == value) continue;
    const auto shown = [](const std::string& option) { return option.empty() ? std::string("''") : option; };
    changes.push_back(c10::str(key, " is ", shown(value), ", and was ", shown(was->second), "; ",
                               effect_of(key, values, before, config)));
  }
  return changes;
}

}  // namespace tessera::train
