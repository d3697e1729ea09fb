#pragma once
#include <functional>
#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// `tessera bench NAME`: benches by name, each a function that hands out rows. All of them print alike: a table for
// people, or with --json one object per row.
namespace tessera::cli {

struct BenchRow {
  std::string bench = {};
  std::string name = {};  // the case, as name/ranks/size/variant: "add/1/-/hit"
  std::string unit = {};  // "us", "GB/s", ...
  double ours = 0;
  std::optional<double> plain = {};  // the same without us: the plain op, the bare backend
  std::optional<double> peer = {};   // the same in another framework; filled in from its script where there is one
  std::string note = {};
};

// {"bench":..,"case":..,"unit":..,"ours":..} and, where there is one, "plain", "peer", "note". One line, no newline.
std::string to_json(const BenchRow& row);
// Throws UsageError for a case that has not four non-empty parts: others read them by place.
void check_case(const BenchRow& row);

using EmitRow = std::function<void(BenchRow)>;  // `bench` is filled in for you

struct Bench {
  std::string name;
  std::string help;  // one line
  std::function<void(const EmitRow&)> run;
};

// Example:  registry.add({"noop", "what the timer itself costs", [](const EmitRow& emit) { emit({...}); }});
class BenchRegistry {
 public:
  void add(Bench bench);                           // throws InternalError if the name is taken
  const Bench& find(std::string_view name) const;  // throws UsageError that lists the names
  const std::vector<Bench>& all() const { return benches_; }

 private:
  std::vector<Bench> benches_;
};

// The table of contents, in benchmarks/all_benches.cpp.
void register_all_benches(BenchRegistry& registry);

// A peer's figures by case, as its script prints them.
struct PeerFigure {
  double value = 0;
  std::optional<double> plain = {};  // what the peer's own plain op takes: value - plain is what the peer adds
};
using PeerFigures = std::map<std::string, PeerFigure>;

struct BenchOutput {
  std::ostream& out;
  bool json = false;
};
// Runs the bench; each row appears as soon as it is there, with the peer's figure of the same case beside it.
void run_bench(const Bench& bench, const PeerFigures& peer, BenchOutput output);

}  // namespace tessera::cli
