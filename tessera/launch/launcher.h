#pragma once
#include <chrono>
#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <vector>

// Starts and supervises the ranks of a job, as torchrun's agent does. One launcher runs on each host.
namespace tessera::launch {

// Options of run(). The names follow torchrun.
struct RunOptions {
  std::vector<std::string> command = {};              // the program and its arguments
  int64_t nproc_per_node = 1;                         // ranks on this host
  int64_t nnodes = 1;                                 // hosts of the job
  int64_t node_rank = 0;                              // index of this host
  std::string rdzv_endpoint = {};                     // host:port of the store, on node 0; may be empty if nnodes is 1
  std::optional<std::set<int64_t>> ranks_shown = {};  // ranks whose output is shown; nullopt: all
  std::string log_dir = {};                           // folder for one log file per rank and stream; empty: no logs
  int64_t threads_per_rank = 0;                       // OMP_NUM_THREADS; 0: the inherited value, else cores / ranks
  bool pin = false;                                   // pins each rank to its own cores
  int64_t max_restarts = 0;                           // restarts of the worker group after a rank fails
  bool direct_output = false;  // local rank 0 inherits our standard output, so that it can detect a terminal
  bool brief_errors = false;   // reports a failed rank in one line: its error message, if it wrote an error file
  std::string program_name = "tessera run";                           // prefix of the launcher's own messages
  std::chrono::milliseconds grace_period = std::chrono::seconds(10);  // between SIGTERM and SIGKILL
  std::chrono::milliseconds rdzv_timeout = std::chrono::minutes(10);  // for the other hosts to join
};

// Runs the job and returns its exit code:
//   0               all ranks on all hosts succeeded
//   N               the exit code of the first rank that failed on any host
//   128 + signal    a signal killed that rank, or the launcher received the signal
// The output of ranks goes to our standard output and error. Messages of the launcher go to standard error.
// Throws UsageError or CommError if the job cannot start. No process is left running.
// Requires: called on the main thread. No other thread waits for child processes meanwhile.
// Example:  RunOptions options{.command = {"./app", "--lr", "3e-4"}, .nproc_per_node = 4};
//           return run(options);
int run(const RunOptions& options);

// A host and a TCP port.
struct Address {
  std::string host;  // name or IP address, without brackets
  int64_t port = 0;  // 1 to 65535
  // Memberwise.
  bool operator==(const Address&) const = default;
};

// "head:29400" -> {"head", 29400}; "[::1]:80" -> {"::1", 80}. Throws UsageError for other text.
Address parse_address(const std::string& text);

}  // namespace tessera::launch
