#pragma once
#include "tessera/rules/detail/rule.h"

#include <vector>

// Where the dims of a tensor are after a view.
namespace tessera::rules {

// Each dim of the input is one dim of the output, or is gone: transpose, select, expand.
struct DimMap {
  std::vector<int64_t> out_dim;  // for each input dim; -1: it must be whole
  bool keeps_partial = true;     // false: the value is not linear in the bits (view.dtype)

  // For each mesh axis the output's placement, none where a cut dim is gone. An axis of one rank loses nothing.
  std::vector<std::optional<Placement>> follow(PlacementsRef in, c10::IntArrayRef mesh_shape) const;
};

// Dims are merged and split: view, reshape. Dims fall into groups of equal product, read from the left:
//
//   [2, 3, 4] -> [6, 4]       {0 1 -> 0} {2 -> 1}
//   [12, 8]   -> [16, 6]      {0 1 -> 0 1}
//
// A cut of a dim in a group of one and one is kept as it is. Otherwise the elements a rank holds of the group, counted
// in row-major order, must be just those which some cut of an output dim gives it, for every rank of the mesh:
//
//   [4, 6] S(0) -> [24]    S(0,6)   rows are runs of 6       [24] S(0,6) -> [4, 6]    S(0)
//   [4, 6] S(1) -> [24]    SS(0,4)  a part of each row       [24] SS(0,4) -> [4, 6]   S(1)
//
// Few candidates are tried, and each is compared element for element, so there is no wrong answer, only none.
struct ViewMap {
  struct Group {
    std::vector<int64_t> in, out;  // dims
  };
  Sizes in_sizes, out_sizes;
  std::vector<Group> groups;

  // Requires: as many elements.
  ViewMap(c10::IntArrayRef in, c10::IntArrayRef out);
  std::vector<std::optional<Placement>> follow(PlacementsRef in, c10::IntArrayRef mesh_shape) const;
};

}  // namespace tessera::rules
