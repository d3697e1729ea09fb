#pragma once
#include "tessera/comm/world.h"
#include "tessera/mesh/device_mesh.h"

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace tessera::testing {

// What the body of a rank is given.
struct Rank {
  int64_t rank = 0;
  World world;

  int64_t size() const { return world.size(); }
  const comm::Group& group() const { return world.group(); }
  DeviceMesh mesh(const std::string& text) const;  // "dp=2,tp=2"
  DeviceMesh mesh(std::vector<int64_t> shape, std::vector<std::string> names = {}) const;
};
using Body = std::function<void(Rank&)>;

struct RankOptions {
  std::string backend = "threads";
  std::chrono::milliseconds timeout{std::chrono::seconds(60)};
};

// Runs `body` on n ranks, each a thread with a world of its own to look at (current, torch threads 1, view replay on).
// A rank that throws frees the others; then every failing rank is reported, in order, by one exception.
// Failed gtest expectations in a body fail the test as usual.
// Example:  run_ranks(4, [](Rank& me) { auto mesh = me.mesh("dp=2,tp=2"); ... });
void run_ranks(int64_t n, const Body& body, const RankOptions& options = {});

struct SpawnOptions {
  std::string backend = "gloo";
  std::chrono::milliseconds timeout{std::chrono::seconds(60)};  // of the whole run; a collective has three quarters
  std::vector<std::string> arguments =
      {};  // of the children, so that they come to the same call: a filter for one test
};

// Runs `body` on n processes. Each child is this program again: it runs to the same call, executes the body as its rank
// (file rendezvous, torch::manual_seed(1234)), and exits: 0, or 10 if the body threw or an expectation failed.
// Requires: the program comes to this call in the same way when started with `arguments`; in a child, calls before this
// one return at once, so a call that is meant to throw has a test of its own.
// Throws if any rank failed or took too long, with the output of those that did. Under gtest use testing/spawn.h.
void spawn_processes(int64_t n, const Body& body, const SpawnOptions& options,
                     const std::function<bool()>& failed_expectations = {});

}  // namespace tessera::testing
