#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

// Starts the ranks of a job on this host, or on this one of several, and stays with them to the end.
namespace tessera::launch {

struct RunOptions {
  std::vector<std::string> command;              // the program and its arguments
  int64_t ranks = 1;                             // on this host
  int64_t nodes = 1, node = 0;                   // hosts of the job, and which this is
  std::string rendezvous;                        // host:port of node 0, where the store is kept; one host needs none
  std::optional<std::set<int64_t>> ranks_shown;  // whose output is shown; none: all
  std::string log_folder;                        // each rank's output also goes to a file here; empty: no
  int64_t threads = 0;                           // of each rank; 0: OMP_NUM_THREADS, else cores / ranks
  bool pin = false;                              // each rank stays on its own cores
  int64_t max_restarts = 0;                      // of all ranks, after one has failed
  bool direct = false;  // rank 0 of this host writes to our standard output itself: it sees the terminal
  bool brief = false;   // a rank that failed is one line: what it said last, where it said anything
  std::string speaker = "tessera run";                           // who speaks when we do
  std::chrono::milliseconds grace = std::chrono::seconds(10);    // between asking ranks to end and killing them
  std::chrono::milliseconds timeout = std::chrono::minutes(10);  // for other hosts to come
};

// Runs the job. Gives the exit code: 0, or that of the first rank that failed anywhere (128 + signal if one ended it);
// 128 + signal if a signal to us ended the job. What ranks print goes to our standard output and error, what we say to
// standard error. Throws UsageError and CommError for jobs that cannot start, with nothing left running.
// Requires: the main thread; no other children of this process are waited for meanwhile.
int run(const RunOptions& options);

// "head:29400" -> {"head", 29400}; "[::1]:80" -> {"::1", 80}. Throws UsageError.
struct Address {
  std::string host;
  int64_t port = 0;
  bool operator==(const Address&) const = default;
};
Address parse_address(const std::string& text);

}  // namespace tessera::launch
