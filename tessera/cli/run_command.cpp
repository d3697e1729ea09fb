#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/cli/check_arguments.h"
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
  command->add_option("-n,--nproc-per-node", o.nproc_per_node, "Number of ranks on this host")
      ->check(in_range(1, 4096))
      ->required();
  command->add_option("--nnodes", o.nnodes, "Number of hosts; run this command on each")
      ->check(in_range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--node-rank", o.node_rank, "Index of this host, from 0")
      ->check(in_range(0, 1 << 20))
      ->capture_default_str();
  command->add_option("--rdzv", o.rdzv_endpoint, "Rendezvous endpoint host:port on node 0; not needed for one host");
  command->add_option("--log-dir", o.log_dir, "Folder for log files rank_N.out and rank_N.err of each rank");
  command->add_option("--ranks-shown", arguments->ranks_shown, "Show only the output of these ranks, as in 0,1")
      ->check(in_range(0, 1e9))
      ->delimiter(',');
  command
      ->add_option("--threads-per-rank", o.threads_per_rank,
                   "OMP_NUM_THREADS of each rank (0: as set in the environment, else cores / ranks)")
      ->check(in_range(0, 65536))
      ->capture_default_str();
  command->add_flag("--pin", o.pin, "Pin each rank to its own cores");
  command->add_option("--max-restarts", o.max_restarts, "Maximum number of restarts of all ranks after a failure")
      ->check(in_range(0, 1e9))
      ->capture_default_str();
  command->add_option("--grace", arguments->grace_period, "Seconds between SIGTERM and SIGKILL when ranks are stopped")
      ->check(in_range(0, 1e6))
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
    const int64_t ranks = options.nproc_per_node * options.nnodes;
    for (const int64_t rank : shown)
      TESSERA_CHECK(rank < ranks, UsageError, "--ranks-shown ", rank, ": the ranks of this job are 0 to ", ranks - 1);
    if (!shown.empty()) options.ranks_shown = {shown.begin(), shown.end()};
    options.grace_period = std::chrono::milliseconds(static_cast<int64_t>(arguments->grace_period * 1000));
    options.rdzv_timeout = std::chrono::milliseconds(static_cast<int64_t>(setting_number("TESSERA_TIMEOUT_S") * 1000));
    const int code = launch::run(options);
    std::_Exit(code);  // skips the shutdown of LibTorch, which takes 0.1 s
  });
}

}  // namespace tessera::cli
