#include "tessera/compile/detail/passes/memory_by_order.h"

#include "tessera/compile/detail/ir/dependencies.h"

#include <algorithm>

namespace tessera::compiler {

MemoryByOrder::MemoryByOrder(const Program& program) : used_(used_buffers(program)), sizes_(program.buffer_bytes()) {
  const auto external = program.external_buffers();
  for (size_t b = 0; b < external.size(); b++)
    if (external[b]) sizes_[b] = 0;
  for (const auto& output : program.outputs)
    if (output.value != kNone) sizes_[static_cast<size_t>(program.buffer_of(output.value))] = 0;
}

std::vector<int64_t> MemoryByOrder::bytes(const std::vector<int32_t>& order) const {
  std::vector<int64_t> curve(order.size() + 1, 0);
  std::vector<int32_t> last(sizes_.size(), -1);
  for (size_t i = order.size(); i-- > 0;)
    for (const auto buffer : used_[static_cast<size_t>(order[i])])
      if (last[static_cast<size_t>(buffer)] < 0) {
        last[static_cast<size_t>(buffer)] = static_cast<int32_t>(i);
        curve[i + 1] -= sizes_[static_cast<size_t>(buffer)];
      }
  std::vector<char> begun(sizes_.size(), 0);
  for (size_t i = 0; i < order.size(); i++)
    for (const auto buffer : used_[static_cast<size_t>(order[i])])
      if (!begun[static_cast<size_t>(buffer)]) {
        begun[static_cast<size_t>(buffer)] = 1;
        curve[i] += sizes_[static_cast<size_t>(buffer)];
      }
  for (size_t i = 1; i < curve.size(); i++) curve[i] += curve[i - 1];
  curve.pop_back();
  return curve;
}

int64_t MemoryByOrder::peak(const std::vector<int32_t>& order) const {
  const auto curve = bytes(order);
  return curve.empty() ? 0 : *std::max_element(curve.begin(), curve.end());
}

}  // namespace tessera::compiler
