#pragma once
#include <CLI/CLI.hpp>

#include <string>
#include <vector>

// Checks a command line before CLI11 parses it, for messages that say what to write instead.
namespace tessera::cli {

// Throws UsageError for a command or flag that does not exist, with the most similar names, and for a flag that has one
// value and is given twice. `arguments` are those after the program's name.
void check_arguments(CLI::App& app, const std::vector<std::string>& arguments);

// Splits "--name=" into "--name" and "". CLI11 would take the next argument as the value.
std::vector<std::string> split_empty_values(std::vector<std::string> arguments);

// Refuses a number out of range, NaN included. --help shows the range.
CLI::Validator in_range(double min, double max);

}  // namespace tessera::cli
