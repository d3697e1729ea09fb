#pragma once
#include "tessera/checkpoint/detail/box.h"

#include <iosfwd>
#include <string>
#include <vector>

// From the boxes a tensor was saved in to those a rank needs now. Pure: no files, no tensors, no ranks.
//
//   saved by 2 ranks     | a a a | b b |
//   needed by 3          | 0 0 | 1 1 | 2 |        rank 1: copy [2:3] of a, [3:4] of b
namespace tessera::dcp {

struct Copy {
  size_t saved;   // which of the saved boxes
  size_t needed;  // which of the needed ones
  Box what;       // global indices, inside of both
  bool operator==(const Copy&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Copy& copy);

struct Reshard {
  std::vector<Copy> copies;
  std::vector<Box> missing;  // needed, and saved nowhere
};
// Requires: the saved boxes do not overlap; then each needed element that was saved is in one copy.
Reshard reshard(const std::vector<Box>& saved, const std::vector<Box>& needed);

// What is wrong with boxes that ought to have every element of a tensor once: one outside, two that overlap, elements
// in none. Names them; "" if nothing is. Boxes without elements are passed over.
std::string why_no_tiling(c10::IntArrayRef sizes, const std::vector<Box>& boxes);

}  // namespace tessera::dcp
