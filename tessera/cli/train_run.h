#pragma once
#include "tessera/train/config.h"

#include <string>

namespace tessera::cli {

// outputs/20260131-174502-gpt-tiny
std::string new_output_folder(const train::TrainConfig& config);
// Makes the folder and writes config.toml into it. UsageError if that cannot be.
void prepare_output(const train::TrainConfig& config);

// Trains as this process's rank of the world, which may be the only one. Throws what goes wrong; what was not learned
// though it was asked for is an error, too.
void run_training(const train::TrainConfig& config);

// Ends the process with the right code and one line of what went wrong: in the file a launcher reads, if there is one,
// else on standard error. 2 for what the caller can mend, 1 for what went wrong on the way, 70 for bugs of ours.
[[noreturn]] void end_with(const std::exception& error);

}  // namespace tessera::cli
