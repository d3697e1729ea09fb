#pragma once
#include "tessera/comm/detail/hosts.h"
#include "tessera/comm/world.h"

#include <map>

namespace tessera {

namespace comm::watch {
class Watch;
}

// What a layer above keeps with a world, and lets go of when the world is destroyed.
struct WorldAttachment {
  virtual ~WorldAttachment() = default;
  virtual void clear() = 0;
};

struct World::State {
  int64_t rank = 0;
  int64_t size = 1;
  std::string asked;              // for: a backend, or "auto"
  std::string backend;            // of the group of all
  std::vector<comm::Host> hosts;  // of all ranks; empty where nobody needs to know
  bool spare_cores = false;
  c10::intrusive_ptr<c10d::Store> store;
  std::chrono::milliseconds timeout{};
  RandomState random;
  std::shared_ptr<comm::watch::Watch> watch;  // null where no peer is a process of this machine's
  comm::Group group;
  std::vector<comm::Group> groups;                            // every one made, `group` included
  std::map<std::vector<int64_t>, comm::Group> shared_groups;  // by members
  std::map<std::vector<int64_t>, int64_t> groups_made;        // by members, so that names agree among them
  std::unique_ptr<WorldAttachment> meshes;                    // interned; mesh/device_mesh.cpp
  bool destroyed = false;
};

}  // namespace tessera
