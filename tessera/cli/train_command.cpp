#include "tessera/base/error.h"
#include "tessera/base/detail/settings.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/train_flags.h"
#include "tessera/cli/train_run.h"
#include "tessera/comm/environment.h"
#include "tessera/launch/launcher.h"
#include "tessera/train/detail/config_options.h"
#include "tessera/train/detail/loader.h"
#include "tessera/train/trainer.h"

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>

namespace tessera::cli {
namespace {

using train::OptionInfo;
using train::TrainConfig;

// What a config says beyond the defaults, as flags: for the ranks.
std::vector<std::string> flags_of(const TrainConfig& config) {
  std::map<std::string, std::string> usual;
  const TrainConfig defaults;
  train::visit_options(defaults,
                       [&](const OptionInfo& row, const auto& value) { usual[row.key] = train::option_text(value); });
  std::vector<std::string> flags;
  train::visit_options(config, [&](const OptionInfo& row, const auto& value) {
    if (const auto text = train::option_text(value); usual[row.key] != text)
      flags.push_back("--" + std::string(row.key) + "=" + text);
  });
  return flags;
}

int64_t count_ranks(const TrainConfig& config, int64_t asked) {
  const int64_t of_mesh = train::ranks_of(config.parallel);
  TESSERA_CHECK(asked == 0 || of_mesh == 0 || asked == of_mesh, UsageError, "mesh '", config.parallel.mesh, "' has ",
                of_mesh, " ranks, and -n asks for ", asked);
  TESSERA_CHECK(asked >= 0, UsageError, "-n ", asked, ": there is at least one rank");
  return std::max<int64_t>({1, asked, of_mesh});
}

int launch_ranks(const TrainConfig& config, int64_t ranks, int64_t threads) {
  launch::RunOptions options;
  options.command = {std::filesystem::read_symlink("/proc/self/exe").string(), "train"};
  for (auto& flag : flags_of(config)) options.command.push_back(flag);
  options.ranks = ranks;
  options.ranks_shown = {{0}};
  options.threads = threads;
  options.direct = true;
  options.brief = true;
  options.speaker = "tessera train";
  return launch::run(options);
}

struct Arguments {
  TrainFlags flags;
  int64_t ranks = 0, threads = 0;
  bool print = false;
};

void train_as_asked(const Arguments& arguments) {
  auto config = arguments.flags.config();
  if (arguments.print) {
    std::cout << config;
    return;
  }
  const auto environment = comm::read_environment();
  if (!environment.launcher.empty()) {  // we are a rank: of ours, of tessera run, torchrun, srun, mpirun
    run_training(config);
    return;
  }
  // All that can be wrong is looked for before anything starts.
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
  std::_Exit(code);  // there is nothing left to end but LibTorch, which takes a tenth of a second for it
}

}  // namespace

void add_train_command(CLI::App& app) {
  auto arguments = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("train", "Trains a model with any mix of data, tensor and sharded parallelism");
  command->add_option("-n,--ranks", arguments->ranks, "Ranks on this host; without it as many as the mesh has");
  command->add_option("--threads-per-rank", arguments->threads, "OMP_NUM_THREADS of each; 0: cores / ranks");
  command->add_flag("--print-config", arguments->print, "Print the config as TOML and stop");
  arguments->flags.add_to(*command);
  command->footer(
      "Exit code: 0; 1 it went wrong on the way or did not learn what was asked; 2 the input is wrong; 130 Ctrl-C.\n"
      "Examples:\n"
      "  tessera train --mesh dp=2,tp=2 --steps 600 --accuracy 0.95\n"
      "  tessera train --mesh fsdp=4 --data book.txt --seq-len 128 --precision bf16\n"
      "  tessera train --print-config > my.toml; tessera train --config my.toml --lr 3e-4\n"
      "  torchrun --no-python --nproc-per-node 8 tessera train --mesh fsdp=4,tp=2 --model gpt2-124m --data tokens.bin");
  command->callback([arguments] {
    try {
      train_as_asked(*arguments);
    } catch (const std::exception& error) {
      end_with(error);
    }
  });
}

}  // namespace tessera::cli
