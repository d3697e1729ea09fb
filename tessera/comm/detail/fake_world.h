#pragma once
#include "tessera/comm/world.h"

namespace tessera {

// RAII: makes this thread a rank of a world of any size without peers, for planning.
// Requires: the thread has no world. Destroy the meshes and tensors of the fake world before it.
class FakeWorld {
 public:
  explicit FakeWorld(int64_t ranks, int64_t rank = 0) { init({.backend = "fake", .rank = rank, .world_size = ranks}); }
  ~FakeWorld() { destroy(); }
  FakeWorld(const FakeWorld&) = delete;
};

}  // namespace tessera
