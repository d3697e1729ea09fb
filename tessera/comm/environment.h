#pragma once
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <string>

// Reads the environment variables of launchers (torchrun, mpirun, srun): rank, world size and rendezvous address.
// init() uses it with init_method "env://".
namespace tessera::comm {

// What the launcher has set.
struct Environment {
  std::string launcher;                    // "RANK and WORLD_SIZE", "Open MPI", "PMI", "Slurm"; empty: no launcher
  int64_t rank = 0, size = 1;              // in the world
  int64_t local_rank = 0, local_size = 1;  // among the ranks of this machine
  // Rendezvous: a store at host:port. If the launcher gives no address, but all ranks are on this machine, the ranks
  // find each other by the name of the job.
  std::string host;
  int64_t port = 0;
  std::string job;
  bool launcher_hosts_store = false;  // false: rank 0 hosts the store
  int64_t restarts = 0;               // number of restarts so far (torchrun)
  bool one_machine = false;           // the launcher says that all ranks are on this machine
  bool operator==(const Environment&) const = default;
};
// One line for people: "Slurm: rank 5 of 7, 1 of 2 here; rank 0's store at gpu07:20195".
std::ostream& operator<<(std::ostream& out, const Environment& environment);

// Reads the environment of this process. Throws UsageError if variables are missing, inconsistent, or not numbers.
Environment read_environment();

// Returns the value of a variable; empty if it is not set.
using Variables = std::function<std::string(const char*)>;
// The same with other variables than those of this process, for tests.
Environment read_environment(const Variables& variables);

namespace detail {
// The first host of a Slurm node list:
// "node[03-05,9],x1" -> "node03"; "a,b" -> "a"; "rack[1-2]-n[4,5]" -> "rack1-n4"
std::string first_host(const std::string& slurm_nodes);
// The number of tasks of machine `node`: "2(x3),1" means 2, 2, 2, 1.
int64_t tasks_on(const std::string& slurm_tasks, int64_t node);
}  // namespace detail
}  // namespace tessera::comm
