#pragma once
#include "tessera/comm/hosts.h"

#include <span>
#include <string>
#include <vector>

// Which backend carries a group.
namespace tessera::comm {

struct Choice {
  std::string backend;
  std::string why;  // "all 4 ranks are on one machine"

  bool operator==(const Choice&) const = default;
};

// True if the choice, or the backend, depends on where the ranks are.
bool needs_hosts(const std::string& asked, int64_t world_size);

// `asked`: a row of comm/backends.cpp, or "auto", which means, the first that holds:
//   one rank, or all in one process     threads
//   all on one machine with /dev/shm    shm
//   otherwise                           gloo
// Throws UsageError if there is no such backend, or if it cannot join these hosts. `hosts`: of the members, whose
// global ranks are `ranks`; may be empty if !needs_hosts.
Choice choose_backend(const std::string& asked, std::span<const int64_t> ranks, std::span<const Host> hosts);

}  // namespace tessera::comm
