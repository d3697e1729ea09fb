#include "tessera/compile/detail/ir/inflight_collectives.h"

#include <algorithm>

namespace tessera::compiler {

void InFlightCollectives::post(const Program& program, const Node& collective) {
  std::vector<int32_t> used;
  collective.each_read([&](ValueId id) { used.push_back(program.buffer_of(id)); });
  collective.each_result([&](ValueId id) { used.push_back(program.buffer_of(id)); });
  posted_++;
  const auto post = [&](ValueId id) { uses_[program.buffer_of(id)] = {used, posted_}; };
  collective.each_write(post);
  collective.each_result(post);
}

std::vector<int32_t> InFlightCollectives::wait(const Program& program, const Node& wait) {
  std::vector<int32_t> used;
  wait.each_read([&](ValueId id) {
    const auto found = uses_.find(program.buffer_of(id));
    if (found == uses_.end()) return;
    used.insert(used.end(), found->second.buffers.begin(), found->second.buffers.end());
    completed_.insert(found->second.collective);
    uses_.erase(found);
  });
  return used;
}

bool InFlightCollectives::uses(int32_t buffer) const {
  return std::any_of(uses_.begin(), uses_.end(), [&](const auto& entry) {
    const auto& buffers = entry.second.buffers;
    return !completed_.count(entry.second.collective) &&
           std::find(buffers.begin(), buffers.end(), buffer) != buffers.end();
  });
}

}  // namespace tessera::compiler
