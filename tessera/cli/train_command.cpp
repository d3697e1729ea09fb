#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/paths.h"
#include "tessera/cli/train_flags.h"
#include "tessera/cli/train_run.h"
#include "tessera/comm/environment.h"
#include "tessera/launch/launcher.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/detail/loader.h"
#include "tessera/train/trainer.h"

#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>

namespace tessera::cli {
namespace {

using train::OptionInfo;
using train::TrainConfig;

// The options that differ from the defaults, as flags for the ranks.
std::vector<std::string> flags_of(const TrainConfig& config) {
  std::map<std::string, std::string> default_text;
  const TrainConfig defaults;
  train::visit_options(
      defaults, [&](const OptionInfo& info, const auto& value) { default_text[info.key] = train::option_text(value); });
  std::vector<std::string> flags;
  train::visit_options(config, [&](const OptionInfo& info, const auto& value) {
    if (const auto text = train::option_text(value); default_text[info.key] != text)
      flags.push_back("--" + std::string(info.key) + "=" + text);
  });
  return flags;
}

// `requested` is the value of -n; 0: not given.
int64_t count_ranks(const TrainConfig& config, int64_t requested) {
  const int64_t mesh_ranks = train::ranks_of(config.parallel);
  TESSERA_CHECK(requested == 0 || mesh_ranks == 0 || requested == mesh_ranks, UsageError, "mesh '",
                config.parallel.mesh, "' needs ", mesh_ranks, " ranks, but -n is ", requested);
  TESSERA_CHECK(requested >= 0, UsageError, "-n ", requested, ": the number of ranks must be at least 1");
  return std::max<int64_t>({1, requested, mesh_ranks});
}

int launch_ranks(const TrainConfig& config, int64_t ranks, int64_t threads) {
  launch::RunOptions options;
  options.command = {program_path().string(), "train"};
  for (auto& flag : flags_of(config)) options.command.push_back(flag);
  options.nproc_per_node = ranks;
  options.ranks_shown = {{0}};
  options.threads_per_rank = threads;
  options.direct_output = true;
  options.brief_errors = true;
  options.program_name = "tessera train";
  return launch::run(options);
}

struct TrainArguments {
  TrainFlags flags;
  int64_t ranks = 0, threads = 0;
  bool print_config = false;
};

void run_train(const TrainArguments& arguments) {
  auto config = arguments.flags.config();
  if (arguments.print_config) {
    std::cout << config;
    return;
  }
  const auto environment = comm::read_environment();
  if (!environment.launcher.empty()) {  // this process is a rank, started by any launcher
    run_training(config);
    return;
  }
  // Report wrong input before any rank starts.
  const int64_t ranks = count_ranks(config, arguments.ranks);
  train::check(config, ranks);
  train::open_data(config);
  train::find_checkpoint(config);
  if (config.metrics.output.empty()) config.metrics.output = new_output_folder(config);
  prepare_output(config);
  if (ranks == 1) {
    run_training(config);
    return;
  }
  const int code = launch_ranks(config, ranks, arguments.threads);
  std::_Exit(code);  // skips the shutdown of LibTorch, which takes 0.1 s
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto arguments = std::make_shared<TrainArguments>();
  auto* command =
      app.add_subcommand("train", "Train a language model with DDP, FSDP, tensor parallelism, or a combination");
  command->add_option("-n,--ranks", arguments->ranks, "Number of ranks on this host (default: the size of --mesh)");
  command->add_option("--threads-per-rank", arguments->threads, "OMP_NUM_THREADS of each rank (0: cores / ranks)");
  command->add_flag("--print-config", arguments->print_config, "Print the config as TOML and exit");
  arguments->flags.add_to(*command);
  command->footer(
      "Exits with 1 if training fails or does not reach --accuracy, with 2 for wrong input, with 130 on Ctrl-C.\n"
      "Examples:\n"
      "  tessera train --mesh dp=2,tp=2 --steps 600 --accuracy 0.95\n"
      "  tessera train --mesh fsdp=4 --data book.txt --seq-len 128 --precision bf16\n"
      "  tessera train --print-config > my.toml; tessera train --config my.toml --lr 3e-4\n"
      "  torchrun --no-python --nproc-per-node 8 tessera train --mesh fsdp=4,tp=2 --model gpt2-124m --data tokens.bin");
  command->callback([arguments] {
    try {
      run_train(*arguments);
    } catch (const std::exception& error) {
      exit_with_error(error);
    }
  });
}

}  // namespace tessera::cli
