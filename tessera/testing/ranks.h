#pragma once
#include "tessera/comm/world.h"
#include "tessera/mesh/device_mesh.h"

#include <chrono>
#include <functional>
#include <string>
#include <vector>

// Runs code on several ranks: threads of this process, or child processes.
namespace tessera::testing {

// The rank on which a body runs.
struct Rank {
  int64_t rank = 0;  // of this thread or process
  World world;       // with all ranks of the run

  int64_t size() const { return world.size(); }               // number of ranks
  const comm::Group& group() const { return world.group(); }  // the default process group
  // A mesh over all ranks: "dp=2,tp=2", or shape and axis names.
  DeviceMesh mesh(const std::string& text) const;
  DeviceMesh mesh(std::vector<int64_t> shape, std::vector<std::string> names = {}) const;
};
// The code of one rank.
using Body = std::function<void(Rank&)>;

// Options of run_ranks.
struct RankOptions {
  std::string backend = "threads";                              // of the default process group
  std::chrono::milliseconds timeout{std::chrono::seconds(60)};  // of a collective
};

// Runs `body` on n ranks. Each rank is a thread with its own current World, one torch thread and view replay. Several
// ranks have their own default generators: torch::manual_seed() in `body` seeds the one of its rank. If a rank
// throws, the collectives of the others fail too, and one exception reports every failed rank in order. Failed gtest
// expectations in a body fail the test as usual.
// Example:  run_ranks(4, [](Rank& me) { auto mesh = me.mesh("dp=2,tp=2"); ... });
void run_ranks(int64_t n, const Body& body, const RankOptions& options = {});

// Options of spawn_processes and spawn_ranks.
struct SpawnOptions {
  std::string backend = "gloo";                                 // of the default process group
  std::chrono::milliseconds timeout{std::chrono::seconds(60)};  // of the run; collectives time out after 3/4 of it
  std::vector<std::string> arguments = {};                      // of the children, for example a filter for one test
};

// Runs `body` on n child processes. Each child runs this program again up to the same call, executes the body as its
// rank (file rendezvous, torch::manual_seed(1234)) and exits. The exit code is 0, or 10 if the body threw or an
// expectation failed.
// Requires: the program reaches this call when it is started with `arguments`. In a child, earlier calls of this
// function return immediately, so a test may contain only one call that is expected to throw.
// Throws if a rank failed or timed out, with the output of these ranks. In a gtest test use testing/spawn.h.
void spawn_processes(int64_t n, const Body& body, const SpawnOptions& options,
                     const std::function<bool()>& failed_expectations = {});

}  // namespace tessera::testing
