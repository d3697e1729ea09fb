#pragma once
#include "tessera/placement/detail/shard.h"

#include <iosfwd>
#include <optional>
#include <vector>

namespace tessera::dcp {

// A rectangular block of a tensor's indices: in dim d the indices offsets[d] to offsets[d] + sizes[d] (DCP:
// ChunkStorageMetadata). A scalar has no dims, and its box has one element. Prints as [0:2, 3:5].
struct Box {
  Sizes offsets, sizes;

  // All indices of a tensor of these sizes.
  static Box full(c10::IntArrayRef sizes) { return {Sizes(sizes.size(), 0), Sizes(sizes.begin(), sizes.end())}; }
  // Both throw UsageError for a box that is no range of indices, or whose number of indices is not an int64: the
  // numbers may come from a file.
  int64_t numel() const;
  int64_t end(size_t dim) const;
  bool operator==(const Box&) const = default;
};
std::ostream& operator<<(std::ostream& out, const Box& box);

// The common indices of two boxes with the same number of dims; none if they are disjoint.
std::optional<Box> intersection(const Box& a, const Box& b);
// The indices of `box` that are in none of the others, as disjoint boxes.
std::vector<Box> difference(const Box& box, const std::vector<Box>& others);

}  // namespace tessera::dcp
