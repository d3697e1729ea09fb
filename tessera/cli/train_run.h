#pragma once
#include "tessera/train/config.h"

#include <string>

namespace tessera::cli {

// A new name, as outputs/20260131-174502-gpt-tiny.
std::string new_output_folder(const train::TrainConfig& config);
// Creates the output folder and writes config.toml into it. Throws UsageError if it cannot.
void prepare_output(const train::TrainConfig& config);

// Trains as one rank of the world, which may have one rank. Throws if training fails or does not reach the required
// accuracy.
void run_training(const train::TrainConfig& config);

// Exits with exit_code_of(error). The message goes to the error file of the launcher, or to standard error if there is
// no launcher.
[[noreturn]] void exit_with_error(const std::exception& error);

}  // namespace tessera::cli
