#pragma once
#include "tessera/comm/detail/hosts.h"
#include "tessera/comm/world.h"

#include <map>

namespace tessera {

namespace comm::watch {
class LivenessMonitor;
class ThreadRanks;
}  // namespace comm::watch

// Data of a higher layer that belongs to a world. destroy() clears it.
struct WorldAttachment {
  virtual ~WorldAttachment() = default;
  virtual void clear() = 0;
};

struct World::State {
  int64_t rank = 0;
  int64_t size = 1;
  std::string requested_backend;  // a name, or "auto"
  std::string backend;            // of the group of all ranks
  std::vector<comm::Host> hosts;  // of all ranks; empty if the backend does not need them
  bool core_per_rank = false;
  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds timeout{};
  RandomState random;
  std::shared_ptr<comm::watch::LivenessMonitor> liveness;  // null if the ranks are threads of one process
  std::shared_ptr<comm::watch::ThreadRanks> thread_ranks;  // null if there is a liveness monitor
  comm::Group group;
  std::vector<comm::Group> groups;                            // all groups, `group` included
  std::map<std::vector<int64_t>, comm::Group> shared_groups;  // by members
  std::map<std::vector<int64_t>, int64_t>
      groups_made;                          // by members: numbers the groups, so that their store keys agree
  std::unique_ptr<WorldAttachment> meshes;  // interned meshes; mesh/detail/intern.cpp
  bool destroyed = false;
};

}  // namespace tessera
