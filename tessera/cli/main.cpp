// The program `tessera`. Its exit codes are in exit_code.h.
#include "tessera/cli/commands.h"
#include "tessera/cli/exit_code.h"
#include "tessera/version.h"

#include <algorithm>
#include <string_view>

namespace {

// In `tessera run ... -- ./app args`, only the arguments before -- are ours.
int count_own_arguments(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "run") return argc;
  return static_cast<int>(std::find(argv, argv + argc, std::string_view("--")) - argv);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Distributed tensors and SPMD training for LibTorch", "tessera"};
  app.require_subcommand(1);
  app.footer(tessera::cli::kExitCodeHelp);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  tessera::cli::add_bench_command(app);
  tessera::cli::add_ckpt_command(app);
  tessera::cli::add_env_command(app);
  tessera::cli::add_opt_command(app);
  tessera::cli::add_plan_command(app);
  tessera::cli::add_report_command(app);
  tessera::cli::add_rules_command(app);
  const int ours = count_own_arguments(argc, argv);
  tessera::cli::add_run_command(app, {argv + std::min(ours + 1, argc), argv + argc});
  tessera::cli::add_selftest_command(app);
  tessera::cli::add_trace_command(app);
  tessera::cli::add_train_command(app);
  return tessera::cli::run_program(app, ours, argv);
}
