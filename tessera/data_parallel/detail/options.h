#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/mesh/device_mesh.h"

#include <optional>

namespace tessera {

// Of DistributedDataParallel and replicate; PyTorch's names.
struct DDPOptions {
  // Whose gradients are averaged: a mesh of one axis, or a group; neither: all ranks.
  DeviceMesh device_mesh = {};
  comm::Group process_group = {};
  // Buckets close when they hold as much; none: 25, and 1 for the first, so that it starts early.
  std::optional<double> bucket_cap_mb = {};
  // Parameters that some rank's loss does not depend on are no error; costs a small collective a backward.
  bool find_unused_parameters = false;
  // .grad lies in the buckets: a copy less and less memory.
  bool gradient_as_bucket_view = false;
  // Every backward is like the first one: unused parameters need no collective, and backward may be nested.
  bool static_graph = false;
  // Buffers are the first rank's, at every forward that follows a reduced backward.
  bool broadcast_buffers = true;
  // Parameters and buffers are the first rank's, at construction.
  bool init_sync = true;
  // Ranks may run different numbers of backward passes under no_sync() between two reductions. Without it that is an
  // error, because one rank forgot its no_sync() far more often.
  bool uneven_accumulation = false;
};

}  // namespace tessera
