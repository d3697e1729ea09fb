#include "benchmarks/harness/process_ranks.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <stdlib.h>
#include <unistd.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <sstream>

namespace tessera::bench {
namespace {

// A temporary file for the rows of rank 0. The parent process reads it after the ranks have ended.
struct RowsFile {
  std::string path = "/tmp/tessera-bench-XXXXXX";
  RowsFile() {
    const int file = mkstemp(path.data());
    TESSERA_CHECK(file >= 0, UsageError, "cannot create the temporary file ", path);
    close(file);
    setenv("TESSERA_BENCH_ROWS", path.c_str(), 1);
  }
  ~RowsFile() { unlink(path.c_str()); }
  RowsFile(const RowsFile&) = delete;
};

// One line per row. The note may have spaces, so it is last. Missing figures are 'nan'.
void write_row(std::ostream& out, const BenchRow& row) {
  const double none = std::numeric_limits<double>::quiet_NaN();
  out << row.name << ' ' << row.unit << ' ' << row.ours << ' ' << row.plain.value_or(none) << ' '
      << row.peer.value_or(none) << ' ' << row.note << std::endl;
}

BenchRow read_row(const std::string& line) {
  std::istringstream in(line);
  BenchRow row;
  std::string ours, plain, peer;
  in >> row.name >> row.unit >> ours >> plain >> peer >> std::ws;
  std::getline(in, row.note);
  row.ours = std::stod(ours);
  if (plain != "nan") row.plain = std::stod(plain);
  if (peer != "nan") row.peer = std::stod(peer);
  return row;
}

}  // namespace

void run_process_ranks(const std::string& bench, int64_t ranks, const EmitRow& emit, const RankBody& body) {
  testing::SpawnOptions options;
  options.backend = "shm";
  options.timeout = std::chrono::minutes(20);
  options.arguments = {bench};
  const auto run_rank = [&](testing::Rank& me) {
    std::ofstream rows;
    if (me.rank == 0) rows.open(setting("TESSERA_BENCH_ROWS"));
    body(me, [&](const BenchRow& row) { write_row(rows, row); });
  };
  const bool is_child = setting_is_set("TESSERA_SPAWN");
  if (is_child) return testing::spawn_processes(ranks, run_rank, options);
  const RowsFile file;
  testing::spawn_processes(ranks, run_rank, options);
  std::ifstream rows(file.path);
  for (std::string line; std::getline(rows, line);) emit(read_row(line));
}

}  // namespace tessera::bench
