#include "tessera/base/error.h"
#include "tessera/base/detail/settings.h"
#include "tessera/cli/commands.h"
#include "tessera/launch/launcher.h"

#include <cstdlib>
#include <memory>

namespace tessera::cli {

void add_run_command(CLI::App& app, const std::vector<std::string>& program) {
  struct Arguments {
    launch::RunOptions options;
    std::vector<int64_t> shown;
    double grace = 10;
  };
  auto given = std::make_shared<Arguments>();
  auto& o = given->options;
  o.command = program;
  auto* command = app.add_subcommand("run", "Starts a program as several ranks and stays with them to the end");
  command->add_option("-n,--nproc-per-node", o.ranks, "Ranks on this host")->required();
  command->add_option("--nnodes", o.nodes, "Hosts; run this command on each")->capture_default_str();
  command->add_option("--node-rank", o.node, "Which of them this is, from 0")->capture_default_str();
  command->add_option("--rdzv", o.rendezvous, "host:port at which node 0 keeps the store; one host needs none");
  command->add_option("--log-dir", o.log_folder, "Also writes what each rank prints to rank_N.out, rank_N.err here");
  command->add_option("--ranks-shown", given->shown, "Show only these ranks' output, as in 0,1")->delimiter(',');
  command
      ->add_option("--threads-per-rank", o.threads, "OMP_NUM_THREADS of each rank; 0: as it is set, else cores / ranks")
      ->capture_default_str();
  command->add_flag("--pin", o.pin, "Keep each rank on cores of its own");
  command->add_option("--max-restarts", o.max_restarts, "How often all ranks are started again after one has failed")
      ->capture_default_str();
  command->add_option("--grace", given->grace, "Seconds between asking ranks to end and killing them")
      ->capture_default_str();
  command->allow_extras();
  command->footer(
      "Exit code: that of the first rank that failed; 128 + signal if a signal ended it.\n"
      "Lines are prefixed with [rank N] where there is more than one rank.\n"
      "Examples:\n  tessera run -n 4 -- ./app --lr 3e-4\n"
      "  tessera run -n 8 --nnodes 2 --node-rank 0 --rdzv head:29400 -- ./app    # on the host `head`\n"
      "  tessera run -n 8 --nnodes 2 --node-rank 1 --rdzv head:29400 -- ./app    # on the other");
  command->callback([given, command] {
    auto& options = given->options;
    const auto extra = command->remaining();
    TESSERA_CHECK(extra.empty(), UsageError, "'", extra[0], "' is no option of tessera run",
                  options.command.empty() ? "; write -- before the program:  tessera run -n 4 -- ./app" : "");
    if (!given->shown.empty()) options.ranks_shown = {given->shown.begin(), given->shown.end()};
    options.grace = std::chrono::milliseconds(static_cast<int64_t>(given->grace * 1000));
    options.timeout = std::chrono::milliseconds(static_cast<int64_t>(setting_number("TESSERA_TIMEOUT_S") * 1000));
    const int code = launch::run(options);
    std::_Exit(code);  // there is nothing left to end but LibTorch, which takes a tenth of a second for it
  });
}

}  // namespace tessera::cli
