#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <unordered_map>
#include <vector>

namespace tessera::compiler {

// Tracks, while a caller walks over the nodes in order, which buffers are used by collectives that are posted and not
// waited for yet.
class InFlightCollectives {
 public:
  void post(const Program& program, const Node& collective);
  // Completes the collective that `wait` waits for. Returns the buffers it used; empty if it was not in flight.
  std::vector<int32_t> wait(const Program& program, const Node& wait);
  bool writes(int32_t buffer) const { return uses_.count(buffer) > 0; }

 private:
  std::unordered_map<int32_t, std::vector<int32_t>> uses_;  // buffer of a result -> all buffers of its collective
};

}  // namespace tessera::compiler
