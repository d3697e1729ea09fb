#pragma once
#include <cstdint>
#include <iosfwd>
#include <set>
#include <string>
#include <utility>
#include <vector>

// What each rank of this host is started with, worked out as values before anything runs.
namespace tessera::launch {

// The share of one host in a job. Ranks are numbered host by host: with 2, 3 and 1 ranks on three hosts, the second has
// first_rank 2, ranks 3, world_size 6.
struct HostShare {
  int64_t node = 0, nodes = 1;
  int64_t first_rank = 0, ranks = 1, world_size = 1;
  std::string store_host = "127.0.0.1";
  int64_t store_port = 0;
  std::string run_id = "none";  // the same on all hosts
  bool operator==(const HostShare&) const = default;
};

struct RankSettings {
  int64_t restarts = 0, max_restarts = 0;
  int64_t threads = 0;               // LibTorch's threads of a rank; 0: the user's OMP_NUM_THREADS, else cores / ranks
  bool pin = false;                  // each rank stays on its own cores
  std::vector<int> cores = {};       // those this process may use
  std::string error_folder = {};     // where ranks leave their last words
  std::set<std::string> given = {};  // variables the user has set, which go before our defaults
};

struct RankPlan {
  int64_t rank = 0, local_rank = 0;
  std::vector<std::pair<std::string, std::string>> variables;  // beside those inherited, or instead of them
  std::vector<int> cores;                                      // empty: any
  std::string error_file;
  bool direct_output = false;  // standard output is the launcher's own, not a pipe to it
  bool operator==(const RankPlan&) const = default;
};
std::ostream& operator<<(std::ostream& out, const RankPlan& plan);

std::vector<RankPlan> plan_ranks(const HostShare& share, const RankSettings& settings);

// The cores of the i-th of n: as even as can be, in order; more ranks than cores take turns.
std::vector<int> cores_of(int64_t i, int64_t n, const std::vector<int>& cores);

}  // namespace tessera::launch
