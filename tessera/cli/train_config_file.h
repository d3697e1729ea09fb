#pragma once
#include "tessera/train/config.h"

#include <string>

namespace tessera::cli {

// Sets what a TOML file says: tables [model], [data], ..., as `tessera train --print-config` writes them. UsageError
// with file and line for what is no TOML, and for options there are not.
void read_train_config(train::TrainConfig& config, const std::string& file);

}  // namespace tessera::cli
