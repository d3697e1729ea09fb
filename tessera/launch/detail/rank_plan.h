#pragma once
#include <cstdint>
#include <iosfwd>
#include <set>
#include <string>
#include <utility>
#include <vector>

// Computes the environment and the cores of each rank of this host, before any process starts.
namespace tessera::launch {

// The ranks that rendezvous assigns to one host. Ranks are numbered host by host: with 2, 3 and 1 ranks on three hosts,
// the second host has first_rank 2, nproc_per_node 3, world_size 6.
struct HostAssignment {
  int64_t node_rank = 0, nnodes = 1;
  int64_t first_rank = 0, nproc_per_node = 1, world_size = 1;
  std::string store_host = "127.0.0.1";
  int64_t store_port = 0;
  std::string run_id = "none";  // the same on all hosts
  bool operator==(const HostAssignment&) const = default;
};

struct RankSettings {
  int64_t restarts = 0, max_restarts = 0;
  int64_t threads_per_rank = 0;         // 0: the user's OMP_NUM_THREADS, else cores / ranks
  bool pin = false;                     // pins each rank to its own cores
  std::vector<int> cores = {};          // cores that this process may use
  std::string error_dir = {};           // folder of the ranks' error files
  std::string job_secret = {};          // of the store; it is in the environment of the ranks, and nowhere else
  std::set<std::string> user_set = {};  // environment variables that the user has set; they override our defaults
};

struct RankPlan {
  int64_t rank = 0, local_rank = 0;
  std::vector<std::pair<std::string, std::string>> variables;  // added to the inherited environment, or replace it
  std::vector<int> cores;                                      // empty: any
  std::string error_file;
  bool direct_output = false;  // inherits the launcher's standard output instead of a pipe
  bool operator==(const RankPlan&) const = default;
};
std::ostream& operator<<(std::ostream& out, const RankPlan& plan);  // without the secret

std::vector<RankPlan> plan_ranks(const HostAssignment& assignment, const RankSettings& settings);

// The cores of local rank i of n, in order and as even as possible. With more ranks than cores, ranks share cores.
std::vector<int> cores_of(int64_t i, int64_t n, const std::vector<int>& cores);

}  // namespace tessera::launch
