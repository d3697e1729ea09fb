#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera {

// A table of who holds which rows and columns of a distributed tensor of one or two dims, the same on every rank; no
// communication. For PyTorch's visualize_sharding print it.
//
//   f32[10, 4][S(0)] on mesh(tp=4)
//            Col 0-3
//   -------  ---------
//   Row 0-2  cpu:0
//   Row 3-5  cpu:1
//   Row 6-8  cpu:2
//   Row 9-9  cpu:3
//
// Ranks that hold nothing, and what is a sum of terms, are named below the table.
// Of a tensor with more dims, `dims` picks the one or two to be drawn: {0, 2}; a cell then names who holds any of it.
std::string visualize_sharding(const at::Tensor& dtensor, c10::IntArrayRef dims = {});

// The same table for a tensor that does not exist yet.
std::string visualize_sharding(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements,
                               c10::IntArrayRef dims = {});

}  // namespace tessera
