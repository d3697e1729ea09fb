#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/cli/commands.h"
#include "tessera/launch/launcher.h"

#include <cstdlib>
#include <memory>

namespace tessera::cli {

void add_run_command(CLI::App& app, const std::vector<std::string>& program) {
  struct RunArguments {
    launch::RunOptions options;
    std::vector<int64_t> ranks_shown;
    double grace_period = 10;
  };
  auto arguments = std::make_shared<RunArguments>();
  auto& o = arguments->options;
  o.command = program;
  auto* command = app.add_subcommand("run", "Start a program as several ranks, as torchrun does");
  command->add_option("-n,--nproc-per-node", o.nproc_per_node, "Number of ranks on this host")->required();
  command->add_option("--nnodes", o.nnodes, "Number of hosts; run this command on each")->capture_default_str();
  command->add_option("--node-rank", o.node_rank, "Index of this host, from 0")->capture_default_str();
  command->add_option("--rdzv", o.rdzv_endpoint, "Rendezvous endpoint host:port on node 0; not needed for one host");
  command->add_option("--log-dir", o.log_dir, "Folder for log files rank_N.out and rank_N.err of each rank");
  command->add_option("--ranks-shown", arguments->ranks_shown, "Show only the output of these ranks, as in 0,1")
      ->delimiter(',');
  command
      ->add_option("--threads-per-rank", o.threads_per_rank,
                   "OMP_NUM_THREADS of each rank (0: as set in the environment, else cores / ranks)")
      ->capture_default_str();
  command->add_flag("--pin", o.pin, "Pin each rank to its own cores");
  command->add_option("--max-restarts", o.max_restarts, "Maximum number of restarts of all ranks after a failure")
      ->capture_default_str();
  command->add_option("--grace", arguments->grace_period, "Seconds between SIGTERM and SIGKILL when ranks are stopped")
      ->capture_default_str();
  command->allow_extras();
  command->footer(
      "Exits with the code of the first rank that failed; 128 + signal if a signal killed it.\n"
      "With more than one rank, output lines have the prefix [rank N].\n"
      "Examples:\n  tessera run -n 4 -- ./app --lr 3e-4\n"
      "  tessera run -n 8 --nnodes 2 --node-rank 0 --rdzv head:29400 -- ./app    # on the host `head`\n"
      "  tessera run -n 8 --nnodes 2 --node-rank 1 --rdzv head:29400 -- ./app    # on the other host");
  command->callback([arguments, command] {
    auto& options = arguments->options;
    const auto extra = command->remaining();
    TESSERA_CHECK(extra.empty(), UsageError, "unknown option '", extra[0], "'",
                  options.command.empty() ? "; write -- before the program:  tessera run -n 4 -- ./app" : "");
    const auto& shown = arguments->ranks_shown;
    if (!shown.empty()) options.ranks_shown = {shown.begin(), shown.end()};
    options.grace_period = std::chrono::milliseconds(static_cast<int64_t>(arguments->grace_period * 1000));
    options.rdzv_timeout = std::chrono::milliseconds(static_cast<int64_t>(setting_number("TESSERA_TIMEOUT_S") * 1000));
    const int code = launch::run(options);
    std::_Exit(code);  // skips the shutdown of LibTorch, which takes 0.1 s
  });
}

}  // namespace tessera::cli
