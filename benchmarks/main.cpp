// The program `tessera-bench`. `tessera bench` executes it.
#include "benchmarks/harness/bench.h"
#include "benchmarks/harness/peer.h"
#include "tessera/base/error.h"
#include "tessera/cli/commands.h"

#include <iostream>

int main(int argc, char** argv) {
  using namespace tessera::bench;
  std::string name;
  bool json = false, list = false, peer = false;
  CLI::App app{"Run a benchmark and print a table", "tessera bench"};
  app.add_option("name", name, "Benchmark name; see --list");
  app.add_flag("--json", json, "Print one JSON object per row instead of a table");
  app.add_flag("--list", list, "List the benchmarks and exit");
  app.add_flag("--peer", peer, "Also run the PyTorch script of the benchmark and show its figures");
  app.footer("Examples:\n  tessera bench --list\n  tessera bench dispatch --peer --json");
  app.callback([&] {
    BenchRegistry registry;
    register_all_benches(registry);
    if (list) {
      for (const Bench& bench : registry.all()) std::cout << bench.name << '\n';
      return;
    }
    TESSERA_CHECK(!name.empty(), UsageError, "bench needs a name; see tessera bench --list");
    const Bench& bench = registry.find(name);
    const PeerFigures figures = peer ? run_peer(bench.name, std::cerr) : PeerFigures();
    run_bench(bench, figures, {std::cout, json});
  });
  return tessera::cli::run_program(app, argc, argv);
}
