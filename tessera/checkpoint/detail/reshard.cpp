#include "tessera/checkpoint/detail/reshard.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <ostream>

namespace tessera::dcp {
namespace {

// The order of their first offsets, without boxes that are empty: what begins behind another's end, and all after it,
// cannot overlap it.
std::vector<size_t> by_start(const std::vector<Box>& boxes) {
  std::vector<size_t> order;
  for (size_t i = 0; i < boxes.size(); i++)
    if (boxes[i].numel() > 0) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return boxes[a].offsets < boxes[b].offsets; });
  return order;
}

bool begins_behind(const Box& later, const Box& box) { return !box.sizes.empty() && later.offsets[0] >= box.end(0); }

}  // namespace

std::ostream& operator<<(std::ostream& out, const Copy& copy) {
  return out << copy.what << " of saved " << copy.saved << " to " << copy.needed;
}

Reshard reshard(const std::vector<Box>& saved, const std::vector<Box>& needed) {
  Reshard plan;
  const auto order = by_start(saved);
  for (size_t n = 0; n < needed.size(); n++) {
    if (needed[n].numel() == 0) continue;
    int64_t found = 0;
    for (const size_t s : order) {
      if (begins_behind(saved[s], needed[n])) break;
      if (auto both = intersection(saved[s], needed[n])) {
        found += both->numel();
        plan.copies.push_back({s, n, std::move(*both)});
      }
    }
    if (found < needed[n].numel()) {
      auto missing = without(needed[n], saved);
      std::move(missing.begin(), missing.end(), std::back_inserter(plan.missing));
    }
  }
  return plan;
}

std::string why_no_tiling(c10::IntArrayRef sizes, const std::vector<Box>& boxes) {
  const auto whole = Box::whole(sizes);
  int64_t numel = 1, found = 0;
  for (const int64_t size : sizes)  // which may come from a file that anyone wrote
    if (size < 0 || __builtin_mul_overflow(numel, size, &numel)) return c10::str("no tensor has the sizes ", sizes);
  for (const auto& box : boxes) {
    if (box.sizes.size() != sizes.size())
      return c10::str("a piece ", box, " has ", box.sizes.size(), " dims, and the tensor ", sizes.size());
    for (size_t d = 0; d < sizes.size(); d++)
      if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.sizes[d] > sizes[d] - box.offsets[d])
        return c10::str("piece ", box, " is outside of it");
  }
  const auto order = by_start(boxes);
  for (size_t i = 0; i < order.size(); i++)
    for (size_t j = i + 1; j < order.size() && !begins_behind(boxes[order[j]], boxes[order[i]]); j++)
      if (const auto both = intersection(boxes[order[i]], boxes[order[j]]))
        return c10::str("pieces ", boxes[order[i]], " and ", boxes[order[j]], " both have ", *both);
  for (const auto& box : boxes) found += box.numel();
  if (found < numel) return c10::str("nobody has ", without(whole, boxes).front());
  return "";
}

}  // namespace tessera::dcp
