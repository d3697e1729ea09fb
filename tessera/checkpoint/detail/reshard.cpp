#include "tessera/checkpoint/detail/reshard.h"

#include <c10/util/StringUtil.h>

#include <algorithm>
#include <numeric>
#include <ostream>

namespace tessera::dcp {
namespace {

// Indices of the boxes sorted by offsets, without empty boxes. A box that starts behind the end of another in dim 0,
// and all boxes after it, cannot overlap that other one.
std::vector<size_t> sorted_by_offset(const std::vector<Box>& boxes) {
  std::vector<size_t> order;
  for (size_t i = 0; i < boxes.size(); i++)
    if (boxes[i].numel() > 0) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return boxes[a].offsets < boxes[b].offsets; });
  return order;
}

bool starts_behind(const Box& later, const Box& box) { return !box.sizes.empty() && later.offsets[0] >= box.end(0); }

}  // namespace

std::ostream& operator<<(std::ostream& out, const BoxCopy& copy) {
  return out << copy.box << " of saved " << copy.saved << " to " << copy.needed;
}

ReshardPlan reshard(const std::vector<Box>& saved, const std::vector<Box>& needed) {
  ReshardPlan plan;
  const auto order = sorted_by_offset(saved);
  for (size_t n = 0; n < needed.size(); n++) {
    if (needed[n].numel() == 0) continue;
    int64_t found = 0;
    for (const size_t s : order) {
      if (starts_behind(saved[s], needed[n])) break;
      if (auto both = intersection(saved[s], needed[n])) {
        found += both->numel();
        plan.copies.push_back({s, n, std::move(*both)});
      }
    }
    if (found < needed[n].numel()) {
      auto missing = difference(needed[n], saved);
      std::move(missing.begin(), missing.end(), std::back_inserter(plan.missing));
    }
  }
  return plan;
}

std::string tiling_error(c10::IntArrayRef sizes, const std::vector<Box>& boxes) {
  const auto full = Box::full(sizes);
  int64_t numel = 1, found = 0;
  for (const int64_t size : sizes)  // sizes may come from an untrusted file; LibTorch counts empty dims as 1 in strides
    if (size < 0 || __builtin_mul_overflow(numel, std::max<int64_t>(size, 1), &numel))
      return c10::str("these sizes are not valid: ", sizes);
  numel = full.numel();
  for (const auto& box : boxes) {
    if (box.sizes.size() != sizes.size())
      return c10::str("shard ", box, " has ", box.sizes.size(), " dims, and the tensor has ", sizes.size());
    for (size_t d = 0; d < sizes.size(); d++)
      if (box.offsets[d] < 0 || box.sizes[d] < 0 || box.sizes[d] > sizes[d] - box.offsets[d])
        return c10::str("shard ", box, " is outside of the tensor");
  }
  const auto order = sorted_by_offset(boxes);
  for (size_t i = 0; i < order.size(); i++)
    for (size_t j = i + 1; j < order.size() && !starts_behind(boxes[order[j]], boxes[order[i]]); j++)
      if (const auto both = intersection(boxes[order[i]], boxes[order[j]]))
        return c10::str("shards ", boxes[order[i]], " and ", boxes[order[j]], " overlap in ", *both);
  for (const auto& box : boxes) found += box.numel();
  if (found < numel) return c10::str("no shard has ", difference(full, boxes).front());
  return "";
}

}  // namespace tessera::dcp
