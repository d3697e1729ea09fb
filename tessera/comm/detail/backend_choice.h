#pragma once
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/hosts.h"

#include <iosfwd>
#include <string>
#include <vector>

// Which backend carries a group.
namespace tessera::comm {

struct Choice {
  std::string backend;
  std::string device_backend;  // of tensors on a device; empty: the same
  std::string why;             // "all 4 ranks are on node7"

  bool operator==(const Choice&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Choice& choice);  // shm, cuda over nccl (all 4 ranks are on node7)

// True if the choice, or the backend, depends on where the ranks are.
bool needs_hosts(const std::string& asked, int64_t world_size);

// Requires: `ranks` are the members, `hosts` those of all ranks of the world; empty if !needs_hosts.
// `asked`: a row of comm/backends.cpp, or "auto", which means, the first that holds:
//   one rank, or all in one process     threads
//   all on one machine with /dev/shm    shm
//   otherwise                           gloo
// and for tensors on a device nccl, where it is built in and every rank of the world has a device of its own.
// Throws UsageError if the backend cannot join these hosts.
Choice choose_backend(const std::string& asked, const std::vector<int64_t>& ranks, const std::vector<Host>& hosts);

c10::intrusive_ptr<c10d::Backend> connect(const Choice& choice, const ConnectOptions& options);

// What "auto" means on this machine, row by row, for people.
struct AutoRow {
  std::string ranks;  // "of one process"
  Choice choice;
};
std::vector<AutoRow> auto_rows();

}  // namespace tessera::comm
