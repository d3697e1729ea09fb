#pragma once
#include <CLI/CLI.hpp>

#include <string>
#include <vector>

// Each adds one command to the program; its callback does the work and throws what goes wrong.
namespace tessera::cli {

void add_bench_command(CLI::App& app);
void add_env_command(CLI::App& app);
void add_opt_command(CLI::App& app);
void add_plan_command(CLI::App& app);
void add_run_command(CLI::App& app, const std::vector<std::string>& program);  // what stands after --
void add_trace_command(CLI::App& app);
void add_train_command(CLI::App& app);

// Parses and runs; gives the exit code, and says what went wrong.
int run_program(CLI::App& app, int argc, char** argv);

}  // namespace tessera::cli
