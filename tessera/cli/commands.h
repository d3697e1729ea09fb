#pragma once
#include <CLI/CLI.hpp>

#include <string>
#include <vector>

// Each function adds one command to the program. The command's callback does the work and throws errors.
namespace tessera::cli {

void add_bench_command(CLI::App& app);
void add_ckpt_command(CLI::App& app);
void add_env_command(CLI::App& app);
void add_opt_command(CLI::App& app);
void add_plan_command(CLI::App& app);
void add_report_command(CLI::App& app);
void add_rules_command(CLI::App& app);
void add_run_command(CLI::App& app, const std::vector<std::string>& program);  // the arguments after --
void add_selftest_command(CLI::App& app);
void add_trace_command(CLI::App& app);
void add_train_command(CLI::App& app);

// Parses the command line, runs the command and prints errors. Returns an ExitCode.
int run_program(CLI::App& app, int argc, char** argv);

}  // namespace tessera::cli
