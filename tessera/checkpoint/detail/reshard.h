#pragma once
#include "tessera/checkpoint/detail/box.h"

#include <iosfwd>
#include <string>
#include <vector>

// Maps the boxes that a tensor was saved in to the boxes that a rank needs now. Pure: no files, tensors or ranks.
//
//   saved by 2 ranks     | a a a | b b |
//   needed by 3          | 0 0 | 1 1 | 2 |        rank 1: copy [2:3] of a, [3:4] of b
namespace tessera::dcp {

// A copy from a saved box to a needed box (DCP: ReadItem).
struct BoxCopy {
  size_t saved;   // index of the saved box
  size_t needed;  // index of the needed box
  Box box;        // global indices, inside of both
  bool operator==(const BoxCopy&) const = default;
};
std::ostream& operator<<(std::ostream& out, const BoxCopy& copy);

struct ReshardPlan {
  std::vector<BoxCopy> copies;
  std::vector<Box> missing;  // needed and not saved
};
// Requires: the saved boxes do not overlap. Then each needed element that was saved is in exactly one copy.
ReshardPlan reshard(const std::vector<Box>& saved, const std::vector<Box>& needed);

// Checks that boxes cover every element of a tensor exactly once. Returns a message that names a box outside of the
// tensor, two boxes that overlap, or elements in no box; "" if all is well. Ignores empty boxes.
std::string tiling_error(c10::IntArrayRef sizes, const std::vector<Box>& boxes);

}  // namespace tessera::dcp
