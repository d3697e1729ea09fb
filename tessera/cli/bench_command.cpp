#include "tessera/base/error.h"
#include "tessera/cli/bench.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/peer.h"

#include <iostream>
#include <memory>

namespace tessera::cli {

void add_bench_command(CLI::App& app) {
  struct Arguments {
    std::string name;
    bool json = false, list = false, peer = false;
  };
  auto given = std::make_shared<Arguments>();
  auto* command = app.add_subcommand("bench", "Runs a benchmark and prints a table");
  command->add_option("name", given->name, "Which one; --list shows them");
  command->add_flag("--json", given->json, "One JSON object per row instead of a table");
  command->add_flag("--list", given->list, "Print the names and stop");
  command->add_flag("--peer", given->peer, "Run the peer's script first and show its figures beside ours");
  command->footer("Examples:\n  tessera bench --list\n  tessera bench dispatch --peer --json");
  command->callback([given] {
    BenchRegistry registry;
    register_all_benches(registry);
    if (given->list) {
      for (const Bench& bench : registry.all()) std::cout << bench.name << '\n';
      return;
    }
    TESSERA_CHECK(!given->name.empty(), UsageError, "bench needs a name; `tessera bench --list` shows them");
    const Bench& bench = registry.find(given->name);
    PeerFigures peer = given->peer ? run_peer(bench.name, std::cerr) : PeerFigures();
    run_bench(bench, peer, {std::cout, given->json});
  });
}

}  // namespace tessera::cli
