#pragma once
#include "tessera/rules/detail/rule.h"

#include <vector>

// How a view maps input dims to output dims, and so input placements to output placements.
namespace tessera::rules {

// For views where each input dim is one output dim or is removed: transpose, select, expand.
struct DimMap {
  std::vector<int64_t> out_dim;  // for each input dim; -1: it must not be sharded
  bool keeps_partial = true;     // false: the value is not linear in the bits (view.dtype)

  // For each mesh axis the output placement, or none if the view removes the sharded dim. An axis of one rank has R
  // then.
  std::vector<std::optional<Placement>> follow(PlacementsRef in, c10::IntArrayRef mesh_shape) const;
};

// For views that merge and split dims: view, reshape. Dims form groups of equal product, read from the left:
//
//   [2, 3, 4] -> [6, 4]       {0 1 -> 0} {2 -> 1}
//   [12, 8]   -> [16, 6]      {0 1 -> 0 1}
//
// A group with one input dim and one output dim keeps its sharding. In other groups, a placement of an output dim is
// found that gives every rank of the mesh the same elements, numbered in row-major order:
//
//   [4, 6] S(0) -> [24]    S(0,6)   shards begin at rows     [24] S(0,6) -> [4, 6]    S(0)
//   [4, 6] S(1) -> [24]    SS(0,4)  a part of each row       [24] SS(0,4) -> [4, 6]   S(1)
//
// A few candidates are tried. Each is compared element by element, so a result is never wrong; it can only be missing.
struct ViewMap {
  struct Group {
    std::vector<int64_t> in, out;  // dims
  };
  Sizes in_sizes, out_sizes;
  std::vector<Group> groups;

  // Requires: in and out have the same number of elements.
  ViewMap(c10::IntArrayRef in, c10::IntArrayRef out);
  std::vector<std::optional<Placement>> follow(PlacementsRef in, c10::IntArrayRef mesh_shape) const;
};

}  // namespace tessera::rules
