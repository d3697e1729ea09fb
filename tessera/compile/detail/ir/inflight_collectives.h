#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <unordered_map>
#include <vector>

namespace tessera::compiler {

// Which buffers collectives that were posted and not waited for yet still write and read.
class Pending {
 public:
  void post(const Program& program, const Node& collective);
  // The buffers that the waited-for collective uses; it is through. None: nothing was pending.
  std::vector<int32_t> wait(const Program& program, const Node& wait);
  bool writes(int32_t buffer) const { return uses_.count(buffer) > 0; }

 private:
  std::unordered_map<int32_t, std::vector<int32_t>> uses_;  // by buffer of a result
};

}  // namespace tessera::compiler
