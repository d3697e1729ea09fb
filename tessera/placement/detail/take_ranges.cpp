#include "tessera/placement/detail/take_ranges.h"

#include <ATen/ops/cat.h>

#include <vector>

namespace tessera {

at::Tensor take_ranges(const at::Tensor& t, int64_t dim, const IndexRanges& ranges) {
  if (ranges.empty()) return t.slice(dim, 0, 0).clone(at::MemoryFormat::Contiguous);
  if (ranges.size() == 1) return t.slice(dim, ranges[0].begin, ranges[0].end).clone(at::MemoryFormat::Contiguous);
  std::vector<at::Tensor> parts;
  for (const auto& [begin, end] : ranges) parts.push_back(t.slice(dim, begin, end));
  return at::cat(parts, dim).contiguous();
}

}  // namespace tessera
