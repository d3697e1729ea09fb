#pragma once
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/hosts.h"

#include <iosfwd>
#include <string>
#include <vector>

// Chooses the backend of a group.
namespace tessera::comm {

struct BackendChoice {
  std::string backend;
  std::string device_backend;  // for device tensors; empty: `backend`
  std::string why;             // "all 4 ranks are on node7"

  bool operator==(const BackendChoice&) const = default;
};
std::ostream& operator<<(std::ostream& out,
                         const BackendChoice& choice);  // shm, cuda over nccl (all 4 ranks are on node7)

// True if the choice, or the backend itself, depends on the hosts of the ranks.
bool needs_hosts(const std::string& requested, int64_t world_size);

// `requested`: a name in comm/backends.h, or "auto". "auto" chooses the first of these that applies:
//   one rank, or all ranks in one process     threads
//   all ranks on one machine with /dev/shm    shm
//   otherwise                                 gloo
// For device tensors it adds nccl, if nccl is built in and every rank of the world has its own device.
// Requires: `ranks` are the members; `hosts` has the host of every rank of the world, or is empty if !needs_hosts.
// Throws UsageError if the backend cannot connect these hosts.
BackendChoice choose_backend(const std::string& requested, const std::vector<int64_t>& ranks,
                             const std::vector<Host>& hosts);

c10::intrusive_ptr<c10d::Backend> connect(const BackendChoice& choice, const ConnectOptions& options);

// What "auto" chooses on this machine, for `tessera env`.
struct AutoChoice {
  std::string ranks;  // "of one process"
  BackendChoice choice;
};
std::vector<AutoChoice> auto_choices();

}  // namespace tessera::comm
