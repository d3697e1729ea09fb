#pragma once
#include "tessera/train/config.h"

#include <exception>

namespace tessera::cli {

// Trains as one rank of the world, which may have one rank. Throws if training fails or does not reach the required
// accuracy. `overwrite`: see train::OutputFolder.
void run_training(const train::TrainConfig& config, bool overwrite);

// Exits with exit_code_of(error). The message goes to the error file of the launcher, or to standard error if there is
// no launcher.
[[noreturn]] void exit_with_error(const std::exception& error);

}  // namespace tessera::cli
