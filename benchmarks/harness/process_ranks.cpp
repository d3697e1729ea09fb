#include "benchmarks/harness/process_ranks.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <stdlib.h>
#include <sys/stat.h>

#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <sstream>
#include <thread>

namespace tessera::bench {
namespace {

constexpr const char* kEnd = "end";  // the line after the last row

// A named pipe for the rows of rank 0, which a thread of the parent process emits as they come.
class RowsPipe {
 public:
  explicit RowsPipe(std::function<void(const std::string&)> on_line) : on_line_(std::move(on_line)) {
    TESSERA_CHECK(mkdtemp(folder_.data()) && mkfifo(path().c_str(), 0600) == 0, UsageError, "cannot create the pipe ",
                  path());
    writer_.open(path(), std::ios::in | std::ios::out);  // a writer for as long as the reader lives: no end of file
    setenv("TESSERA_BENCH_ROWS", path().c_str(), 1);
    reader_ = std::thread([this] { read_lines(); });
  }
  ~RowsPipe() {
    if (reader_.joinable()) end();
    std::filesystem::remove_all(folder_);
  }
  RowsPipe(const RowsPipe&) = delete;

  // Waits for the rows that were written; throws what emitting one has thrown.
  void close() {
    end();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  std::string path() const { return folder_ + "/rows"; }
  void end() {
    writer_ << kEnd << std::endl;
    reader_.join();
  }
  void read_lines() {
    std::ifstream lines(path());
    for (std::string line; std::getline(lines, line) && line != kEnd;) try {
        if (!error_) on_line_(line);
      } catch (...) {
        error_ = std::current_exception();
      }
  }

  std::string folder_ = "/tmp/tessera-bench-XXXXXX";
  std::function<void(const std::string&)> on_line_;
  std::fstream writer_;
  std::exception_ptr error_;
  std::thread reader_;
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
  RowsPipe rows([&](const std::string& line) { emit(read_row(line)); });
  testing::spawn_processes(ranks, run_rank, options);
  rows.close();
}

}  // namespace tessera::bench
