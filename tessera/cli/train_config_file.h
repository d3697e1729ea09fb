#pragma once
#include "tessera/train/config.h"

#include <string>

namespace tessera::cli {

// Sets the options of a TOML file, in the format of `tessera train --print-config`.
// Throws UsageError with file and line for a syntax error or an unknown option.
void read_train_config(train::TrainConfig& config, const std::string& file);

}  // namespace tessera::cli
