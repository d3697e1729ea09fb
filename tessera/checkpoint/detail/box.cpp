#include "tessera/checkpoint/detail/box.h"

#include <algorithm>
#include <ostream>
#include <string>

namespace tessera::dcp {
namespace {

// Appends the parts of `box` around `hole`, which is inside of it: in each dim the parts before and behind the hole,
// restricted to the hole in the earlier dims.
//
//   AAAA
//   BhhC      hole h, parts A, D of dim 0 and B, C of dim 1
//   DDDD
void split_around(Box box, const Box& hole, std::vector<Box>& parts) {
  for (size_t d = 0; d < box.sizes.size(); d++) {
    Box before = box, behind = box;
    before.sizes[d] = hole.offsets[d] - box.offsets[d];
    behind.offsets[d] = hole.end(d);
    behind.sizes[d] = box.end(d) - hole.end(d);
    if (before.numel() > 0) parts.push_back(std::move(before));
    if (behind.numel() > 0) parts.push_back(std::move(behind));
    box.offsets[d] = hole.offsets[d];
    box.sizes[d] = hole.sizes[d];
  }
}

}  // namespace

int64_t Box::numel() const {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  return numel;
}

std::ostream& operator<<(std::ostream& out, const Box& box) {
  out << '[';
  for (size_t d = 0; d < box.sizes.size(); d++) {
    int64_t end = 0;  // a box of an untrusted file can exceed 64 bits, and is shown in the error
    const bool fits = !__builtin_add_overflow(box.offsets[d], box.sizes[d], &end);
    out << (d ? ", " : "") << box.offsets[d] << ':' << (fits ? std::to_string(end) : "overflow");
  }
  return out << ']';
}

std::optional<Box> intersection(const Box& a, const Box& b) {
  Box both = a;
  for (size_t d = 0; d < a.sizes.size(); d++) {
    both.offsets[d] = std::max(a.offsets[d], b.offsets[d]);
    both.sizes[d] = std::min(a.end(d), b.end(d)) - both.offsets[d];
    if (both.sizes[d] <= 0) return std::nullopt;
  }
  return both;
}

std::vector<Box> difference(const Box& box, const std::vector<Box>& others) {
  std::vector<Box> left;
  if (box.numel() > 0) left.push_back(box);
  for (const auto& other : others) {
    std::vector<Box> parts;
    for (auto& part : left)
      if (const auto hole = intersection(part, other))
        split_around(std::move(part), *hole, parts);
      else
        parts.push_back(std::move(part));
    left = std::move(parts);
  }
  return left;
}

}  // namespace tessera::dcp
