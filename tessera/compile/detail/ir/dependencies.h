#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// Which nodes must have run before a node: those that write what it reads or writes, those that read what it writes,
// and, for a collective, the collectives before it on its group, which all ranks post in one order. A collective that
// is under way counts as reading its arguments and writing its results until its wait.
class Dependencies {
 public:
  // Any: of data alone. Whoever then changes the order of collectives must come to the same order on all ranks.
  enum class Collectives : uint8_t { InOrder, Any };
  explicit Dependencies(const Program& program, Collectives collectives = Collectives::InOrder);
  const std::vector<int32_t>& before(size_t node) const { return before_[node]; }
  const std::vector<int32_t>& after(size_t node) const { return after_[node]; }

 private:
  std::vector<std::vector<int32_t>> before_, after_;
};

// Puts the nodes in this order, if it is a right one; InternalError names two that it has the wrong way round.
void reorder(Program& program, const std::vector<int32_t>& order,
             Dependencies::Collectives collectives = Dependencies::Collectives::InOrder);

// For each node, the values that nobody reads after it: of buffers, by buffer. What is external or put out never is.
struct Lifetime {
  int32_t first = -1, last = -1;  // nodes; -1: none touches it
};
std::vector<Lifetime> lifetimes(const Program& program);
// By node, the buffers it uses; a wait those of the collective it waits for, too.
std::vector<std::vector<int32_t>> used_buffers(const Program& program);

}  // namespace tessera::compiler
