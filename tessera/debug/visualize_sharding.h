#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/placement.h"

#include <ATen/core/Tensor.h>

#include <string>

namespace tessera {

// A table of the rows and columns that each rank has of a distributed tensor of one or two dims (PyTorch:
// visualize_sharding). It gives the text and does not print it. The text is the same on every rank, without
// communication.
//
//   f32[10, 4][S(0)] on mesh(tp=4)
//            Col 0-3
//   -------  ---------
//   Row 0-2  cpu:0
//   Row 3-5  cpu:1
//   Row 6-8  cpu:2
//   Row 9-9  cpu:3
//
// Ranks without elements and partial axes are listed below the table. For a tensor with more dims, `dims` selects one
// or two of them, for example {0, 2}. A cell then lists the ranks that have any element of it.
std::string visualize_sharding(const at::Tensor& dtensor, c10::IntArrayRef dims = {});

// The same table for a tensor that does not exist yet.
std::string visualize_sharding(c10::IntArrayRef sizes, const DeviceMesh& mesh, PlacementsRef placements,
                               c10::IntArrayRef dims = {});

}  // namespace tessera
