#include "tessera/placement/detail/take_runs.h"

#include <ATen/ops/cat.h>

#include <vector>

namespace tessera {

at::Tensor take_runs(const at::Tensor& t, int64_t dim, const Runs& runs) {
  if (runs.empty()) return t.narrow(dim, 0, 0).clone(at::MemoryFormat::Contiguous);
  if (runs.size() == 1)
    return t.narrow(dim, runs[0].begin, runs[0].end - runs[0].begin).clone(at::MemoryFormat::Contiguous);
  std::vector<at::Tensor> pieces;
  for (const auto& run : runs) pieces.push_back(t.narrow(dim, run.begin, run.end - run.begin));
  return at::cat(pieces, dim).contiguous();
}

}  // namespace tessera
