#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// The memory use of a program for a given order of its nodes: the bytes of live buffers at each node. External buffers
// and outputs are not counted, because they are alive in every order.
class MemoryByOrder {
 public:
  explicit MemoryByOrder(const Program& program);
  std::vector<int64_t> bytes(const std::vector<int32_t>& order) const;  // by position in `order`
  int64_t peak(const std::vector<int32_t>& order) const;

 private:
  std::vector<std::vector<int32_t>> used_;  // by node
  std::vector<int64_t> sizes_;              // by buffer; 0: not counted
};

}  // namespace tessera::compiler
