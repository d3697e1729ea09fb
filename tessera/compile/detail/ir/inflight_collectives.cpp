#include "tessera/compile/detail/ir/inflight_collectives.h"

namespace tessera::compiler {

void InFlightCollectives::post(const Program& program, const Node& collective) {
  std::vector<int32_t> used;
  collective.each_read([&](ValueId id) { used.push_back(program.buffer_of(id)); });
  collective.each_result([&](ValueId id) { used.push_back(program.buffer_of(id)); });
  collective.each_write([&](ValueId id) { uses_[program.buffer_of(id)] = used; });
  collective.each_result([&](ValueId id) { uses_[program.buffer_of(id)] = used; });
}

std::vector<int32_t> InFlightCollectives::wait(const Program& program, const Node& wait) {
  std::vector<int32_t> used;
  wait.each_read([&](ValueId id) {
    const auto found = uses_.find(program.buffer_of(id));
    if (found == uses_.end()) return;
    used.insert(used.end(), found->second.begin(), found->second.end());
    uses_.erase(found);
  });
  return used;
}

}  // namespace tessera::compiler
