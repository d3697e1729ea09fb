#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// How many bytes of memory that a program makes are in use while its nodes run, for orders of the nodes. What is
// external or put out is not counted: it is there in any order.
class MemoryByOrder {
 public:
  explicit MemoryByOrder(const Program& program);
  std::vector<int64_t> bytes(const std::vector<int32_t>& order) const;  // by place
  int64_t peak(const std::vector<int32_t>& order) const;

 private:
  std::vector<std::vector<int32_t>> used_;  // by node
  std::vector<int64_t> sizes_;              // by buffer; 0: not counted
};

}  // namespace tessera::compiler
