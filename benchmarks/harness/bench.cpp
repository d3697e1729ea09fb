#include "benchmarks/harness/bench.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/error.h"

#include <algorithm>
#include <iomanip>
#include <ostream>
#include <sstream>

namespace tessera::bench {
namespace {

constexpr int kCaseWidth = 40, kFigureWidth = 12;

std::string figure(std::optional<double> value) {
  if (!value) return "-";
  std::ostringstream text;
  text << std::setprecision(4) << *value;
  return text.str();
}

void print_line(std::ostream& out, const std::string& name, const std::string& unit, const std::string& ours,
                const std::string& plain, const std::string& peer, const std::string& note) {
  std::ostringstream line;
  line << std::left << std::setw(kCaseWidth) << name << ' ' << std::setw(6) << unit << std::right;
  for (const auto& column : {ours, plain, peer}) line << ' ' << std::setw(kFigureWidth) << column;
  if (!note.empty()) line << "  " << note;
  out << line.str() << std::endl;  // flushed, because a benchmark may take minutes
}

}  // namespace

std::string to_json(const BenchRow& row) {
  Json::Object object{{"bench", row.bench}, {"case", row.name}, {"unit", row.unit}, {"ours", row.ours}};
  if (row.plain) object.emplace_back("plain", *row.plain);
  if (row.peer) object.emplace_back("peer", *row.peer);
  if (!row.note.empty()) object.emplace_back("note", row.note);
  return Json(std::move(object)).dump();
}

void check_case(const BenchRow& row) {
  size_t parts = 1 + static_cast<size_t>(std::count(row.name.begin(), row.name.end(), '/'));
  bool empty_part = ("/" + row.name + "/").find("//") != std::string::npos;
  TESSERA_CHECK(parts == 4 && !empty_part, UsageError, "benchmark ", row.bench, ": case '", row.name,
                "' does not have the form name/ranks/size/variant; write '-' for an unused part, as in add/1/-/hit");
}

void BenchRegistry::add(Bench bench) {
  for (const Bench& other : benches_)
    TESSERA_CHECK(other.name != bench.name, InternalError, "two benchmarks have the name '", bench.name, "'");
  benches_.push_back(std::move(bench));
}

const Bench& BenchRegistry::find(std::string_view name) const {
  std::string names;
  for (const Bench& bench : benches_) {
    if (bench.name == name) return bench;
    names += (names.empty() ? "" : ", ") + bench.name;
  }
  TESSERA_FAIL(UsageError, "unknown benchmark '", name, "'; known: ", names);
}

void run_bench(const Bench& bench, const PeerFigures& peer, BenchOutput output) {
  if (!output.json) print_line(output.out, bench.name, "unit", "ours", "plain", "peer", "");
  bench.run([&](BenchRow row) {
    row.bench = bench.name;
    check_case(row);
    if (auto found = peer.find(row.name); found != peer.end() && !row.peer) {
      row.peer = found->second.value;
      if (found->second.plain) {
        if (!row.note.empty()) row.note += "; ";
        row.note += "peer's plain " + figure(found->second.plain);
      }
    }
    if (output.json)
      output.out << to_json(row) << std::endl;
    else
      print_line(output.out, row.name, row.unit, figure(row.ours), figure(row.plain), figure(row.peer), row.note);
  });
}

}  // namespace tessera::bench
