#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <unordered_map>
#include <unordered_set>
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
  // Reads or writes. The first wait for a result of a coalesced collective completes all of it.
  bool uses(int32_t buffer) const;

 private:
  struct InFlight {
    std::vector<int32_t> buffers;
    int64_t collective;
  };
  std::unordered_map<int32_t, InFlight> uses_;  // buffer of a result -> all buffers of its collective
  std::unordered_set<int64_t> completed_;       // with results that are not waited for yet
  int64_t posted_ = 0;
};

}  // namespace tessera::compiler
