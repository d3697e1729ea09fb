// The program `tessera`. Exit codes: 0 done, 1 it failed, 2 a bug of ours, 100 and up: the command line is wrong.
// `tessera run` ends as its first rank that failed, `tessera opt` with 2 for a program or a pass that it cannot read,
// `tessera train` with 2 for input that is wrong.
#include "tessera/cli/commands.h"
#include "tessera/version.h"

#include <algorithm>
#include <string_view>

namespace {

// Of `tessera run ... -- ./app args` the part after -- is the program's; options are read from the part before it only.
int count_own_arguments(int argc, char** argv) {
  if (argc < 2 || std::string_view(argv[1]) != "run") return argc;
  return static_cast<int>(std::find(argv, argv + argc, std::string_view("--")) - argv);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Distributed tensors and SPMD training for LibTorch", "tessera"};
  app.require_subcommand(1);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
  tessera::cli::add_bench_command(app);
  tessera::cli::add_env_command(app);
  tessera::cli::add_opt_command(app);
  tessera::cli::add_plan_command(app);
  const int ours = count_own_arguments(argc, argv);
  tessera::cli::add_run_command(app, {argv + std::min(ours + 1, argc), argv + argc});
  tessera::cli::add_trace_command(app);
  tessera::cli::add_train_command(app);
  return tessera::cli::run_program(app, ours, argv);
}
