#pragma once
#include "tessera/models/detail/model_config.h"

#include <string>
#include <variant>
#include <vector>

// Named model sizes.
namespace tessera::models {

// The configuration of any model.
using Config = std::variant<GPT2Config, LlamaConfig>;

// A model that can be selected by name, such as "gpt2-124m".
struct Size {
  const char* name;
  Config config;
};

// All named models.
const std::vector<Size>& all_sizes();

// The configuration with this name. Throws UsageError with similar names for an unknown name.
// Example:  GPT2 model(std::get<GPT2Config>(find_config("gpt2-124m")));
const Config& find_config(const std::string& name);

// The number of parameters.
int64_t parameter_count(const Config& config);

}  // namespace tessera::models
