#include "tessera/base/error.h"
#include "tessera/cli/check_arguments.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/paths.h"
#include "tessera/cli/train_flags.h"
#include "tessera/cli/train_run.h"
#include "tessera/comm/environment.h"
#include "tessera/launch/launcher.h"
#include "tessera/train/detail/device.h"
#include "tessera/train/detail/loader.h"
#include "tessera/train/detail/memory_check.h"
#include "tessera/train/detail/output_folder.h"
#include "tessera/train/trainer.h"

#include <cstdlib>
#include <iostream>
#include <memory>

namespace tessera::cli {
namespace {

using train::TrainConfig;

// `requested` is the value of -n; 0: not given.
int64_t count_ranks(const TrainConfig& config, int64_t requested) {
  const int64_t mesh_ranks = train::ranks_of(config.parallel);
  TESSERA_CHECK(requested == 0 || mesh_ranks == 0 || requested == mesh_ranks, UsageError, "mesh '",
                config.parallel.mesh, "' needs ", mesh_ranks, " ranks, but -n is ", requested);
  return std::max<int64_t>({1, requested, mesh_ranks});
}

int launch_ranks(const TrainConfig& config, int64_t ranks, int64_t threads, bool overwrite) {
  launch::RunOptions options;
  options.command = {program_path().string(), "train"};
  if (overwrite) options.command.push_back("--overwrite");
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
  bool print_config = false, overwrite = false;
};

void run_train(const TrainArguments& arguments) {
  auto config = arguments.flags.config();
  if (arguments.print_config) {
    std::cout << config;
    return;
  }
  const auto environment = comm::read_environment();
  if (!environment.launcher.empty()) {  // this process is a rank, started by any launcher
    run_training(config, arguments.overwrite);
    return;
  }
  // Report wrong input before any rank starts.
  const int64_t ranks = count_ranks(config, arguments.ranks);
  train::check(config, ranks);
  train::check_device(config.training.device);
  train::check_memory(config, ranks, config.training.device == "cpu" ? ranks : 1);
  train::open_data(config);
  train::find_checkpoint(config);
  train::check_output(config, arguments.overwrite);
  if (ranks == 1) {
    run_training(config, arguments.overwrite);
    return;
  }
  const int code = launch_ranks(config, ranks, arguments.threads, arguments.overwrite);
  std::_Exit(code);  // skips the shutdown of LibTorch, which takes 0.1 s
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto arguments = std::make_shared<TrainArguments>();
  auto* command =
      app.add_subcommand("train", "Train a language model with DDP, FSDP, tensor parallelism, or a combination");
  command->add_option("-n,--ranks", arguments->ranks, "Number of ranks on this host (default: the size of --mesh)")
      ->check(in_range(1, 4096));
  command->add_option("--threads-per-rank", arguments->threads, "OMP_NUM_THREADS of each rank (0: cores / ranks)")
      ->check(in_range(0, 65536));
  command->add_flag("--overwrite", arguments->overwrite,
                    "Delete the outputs and checkpoints of an earlier run in the output folder");
  command->add_flag("--print-config", arguments->print_config, "Print the config as TOML and exit");
  arguments->flags.add_to(*command);
  command->footer(
      "Exits with 1 if training fails, the disk is full or --accuracy is not reached, with 2 for wrong input, with 130 "
      "on Ctrl-C.\n"
      "Examples:\n"
      "  tessera train --mesh dp=2,tp=2 --steps 600 --accuracy 0.95\n"
      "  tessera train --mesh pp=2,dp=2 --pipeline-schedule Interleaved1F1B --microbatches 8\n"
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
