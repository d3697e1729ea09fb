#pragma once
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>

// Who started this process, as what rank, and where the ranks meet: read from the variables launchers set.
namespace tessera::comm {

struct Environment {
  std::string launcher;  // a row of environment.cpp; empty: none, a world of one
  int64_t rank = 0, size = 1;
  int64_t local_rank = 0, local_size = 1;  // among the ranks of this machine
  // Where the ranks meet: a store at host:port, or, where the launcher names no place but all ranks are on this
  // machine, by the name of the job.
  std::string host;
  int64_t port = 0;
  std::string job;
  bool store_is_kept = false;  // by the launcher; otherwise rank 0 keeps it
  int64_t restarts = 0;        // so far
  bool operator==(const Environment&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Environment& environment);

// Throws UsageError where variables are missing, contradict each other, or are no numbers.
Environment read_environment();

// The value of a variable; empty if it is not set.
using Variables = std::function<std::string(const char*)>;
Environment read_environment(const Variables& variables);

namespace detail {
// "node[03-05,9],x1" -> "node03"; "a,b" -> "a"; "rack[1-2]-n[4,5]" -> "rack1-n4"
std::string first_host(const std::string& slurm_nodes);
// How many tasks the `node`-th machine has: "2(x3),1" is 2, 2, 2, 1
int64_t tasks_on(const std::string& slurm_tasks, int64_t node);
}  // namespace detail
}  // namespace tessera::comm
