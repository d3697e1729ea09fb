#pragma once
#include "tessera/comm/collectives.h"
#include "tessera/mesh/device_mesh.h"

#include <optional>

namespace tessera {

// Options of DistributedDataParallel and replicate, with PyTorch's names.
struct DDPOptions {
  // The ranks over which gradients are averaged: a mesh with one axis, or a group. If neither is given: all ranks.
  DeviceMesh device_mesh = {};
  GroupRef process_group = {};
  // Bucket size in MiB. None: 25, and 1 for the first bucket, so that its all-reduce starts early.
  std::optional<double> bucket_cap_mb = {};
  // Allows parameters that some rank's loss does not use. Costs one small all-reduce per backward.
  bool find_unused_parameters = false;
  // .grad is a view of the bucket, which saves memory and one copy.
  bool gradient_as_bucket_view = false;
  // The graph is the same in every iteration: unused parameters need no collective, and backward may be nested.
  bool static_graph = false;
  // Broadcasts buffers from rank 0 in each forward that follows a backward with synchronization.
  bool broadcast_buffers = true;
  // Broadcasts parameters and buffers from rank 0 at construction.
  bool init_sync = true;
  // Allows ranks to run different numbers of backward passes under no_sync() between two reductions. Otherwise that is
  // an error, because usually one rank lacks its no_sync().
  bool uneven_accumulation = false;
};

}  // namespace tessera
