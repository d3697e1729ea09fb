#pragma once
#include "tessera/models/detail/model_config.h"

#include <string>
#include <variant>
#include <vector>

namespace tessera::models {

using Config = std::variant<GPT2Config, LlamaConfig>;

struct Size {
  const char* name;
  Config config;
};

// Every model that can be asked for by name.
const std::vector<Size>& all_sizes();

// Throws UsageError with the nearest names.
// Example:  GPT2 model(std::get<GPT2Config>(find_config("gpt2-124m")));
const Config& find_config(const std::string& name);

int64_t parameter_count(const Config& config);

}  // namespace tessera::models
