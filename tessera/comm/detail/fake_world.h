#pragma once
#include "tessera/comm/world.h"

namespace tessera {

// Makes this thread rank 0 of a world of any size without peers, while alive: to work out what would be done there.
// Requires: the thread has no world. What belongs to the world, meshes and tensors, must go first.
class FakeWorld {
 public:
  explicit FakeWorld(int64_t ranks) { init({.backend = "fake", .rank = 0, .world_size = ranks}); }
  ~FakeWorld() { destroy(); }
  FakeWorld(const FakeWorld&) = delete;
};

}  // namespace tessera
