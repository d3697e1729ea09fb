#pragma once
#include "tessera/placement/detail/shard.h"

#include <iosfwd>
#include <optional>
#include <vector>

namespace tessera::dcp {

// A block of the indices of a tensor: in dim d those from offsets[d] on, sizes[d] of them. A scalar has no dims, and
// its box one element. A small value, pure; printed as [0:2, 3:5].
struct Box {
  Sizes offsets, sizes;

  static Box whole(c10::IntArrayRef sizes) { return {Sizes(sizes.size(), 0), Sizes(sizes.begin(), sizes.end())}; }
  int64_t numel() const;
  int64_t end(size_t dim) const { return offsets[dim] + sizes[dim]; }
  bool operator==(const Box&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Box& box);

// What both have, of as many dims; none if that is nothing.
std::optional<Box> intersection(const Box& a, const Box& b);
// What `box` has and no other does, as boxes that do not overlap.
std::vector<Box> without(const Box& box, const std::vector<Box>& others);

}  // namespace tessera::dcp
