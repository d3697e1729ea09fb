#pragma once
#include <functional>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// Benchmarks by name, for `tessera bench NAME`. A benchmark is a function that emits rows. The harness prints them as a
// table, or with --json as one object per row.
namespace tessera::bench {

struct BenchRow {
  std::string bench = {};
  std::string name = {};  // case, as name/ranks/size/variant: "add/1/-/hit"
  std::string unit = {};  // "us", "GB/s", ...
  double ours = 0;
  std::optional<double> plain = {};  // the same without Tessera: the plain op, the bare backend
  std::optional<double> peer = {};   // the same in PyTorch, from its script in benchmarks/peers
  std::string note = {};
};

// {"bench":..,"case":..,"unit":..,"ours":..} and, if set, "plain", "peer", "note". One line without newline.
std::string to_json(const BenchRow& row);
// Throws UsageError if the case name does not have four non-empty parts.
void check_case(const BenchRow& row);

using EmitRow = std::function<void(BenchRow)>;  // the harness sets `bench`

struct Bench {
  std::string name;
  std::string help;  // one line
  std::function<void(const EmitRow&)> run;
};

// Example:  registry.add({"noop", "cost of the timer", [](const EmitRow& emit) { emit({...}); }});
class BenchRegistry {
 public:
  void add(Bench bench);                           // throws InternalError for a duplicate name
  const Bench& find(std::string_view name) const;  // throws UsageError with the list of names
  const std::vector<Bench>& all() const { return benches_; }

 private:
  std::vector<Bench> benches_;
};

// Registers all benchmarks (benchmarks/all_benches.cpp).
void register_all_benches(BenchRegistry& registry);

// A figure of a peer script.
struct PeerFigure {
  double value = 0;
  std::optional<double> plain = {};  // of the peer's plain op; value - plain is the peer's overhead
};
using PeerFigures = std::map<std::string, PeerFigure>;  // by case

struct BenchOutput {
  std::ostream& out;
  bool json = false;
};
// Runs the benchmark. Prints each row at once, with the peer's figure for the same case.
void run_bench(const Bench& bench, const PeerFigures& peer, BenchOutput output);

}  // namespace tessera::bench
