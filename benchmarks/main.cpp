// The program `tessera-bench`, which `tessera bench` starts.
#include "tessera/base/error.h"
#include "benchmarks/harness/bench.h"
#include "tessera/cli/commands.h"
#include "benchmarks/harness/peer.h"

#include <iostream>

int main(int argc, char** argv) {
  using namespace tessera::cli;
  std::string name;
  bool json = false, list = false, peer = false;
  CLI::App app{"Runs a benchmark and prints a table", "tessera bench"};
  app.add_option("name", name, "Which one; --list shows them");
  app.add_flag("--json", json, "One JSON object per row instead of a table");
  app.add_flag("--list", list, "Print the names and stop");
  app.add_flag("--peer", peer, "Run the peer's script first and show its figures beside ours");
  app.footer("Examples:\n  tessera bench --list\n  tessera bench dispatch --peer --json");
  app.callback([&] {
    BenchRegistry registry;
    register_all_benches(registry);
    if (list) {
      for (const Bench& bench : registry.all()) std::cout << bench.name << '\n';
      return;
    }
    TESSERA_CHECK(!name.empty(), UsageError, "bench needs a name; `tessera bench --list` shows them");
    const Bench& bench = registry.find(name);
    const PeerFigures figures = peer ? run_peer(bench.name, std::cerr) : PeerFigures();
    run_bench(bench, figures, {std::cout, json});
  });
  return run_program(app, argc, argv);
}
