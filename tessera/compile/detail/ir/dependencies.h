#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// The dependence graph of a program: which nodes must run before a node. These are the nodes that
//   - write what it reads or writes (read after write, write after write),
//   - read what it writes (write after read),
//   - for a collective: are earlier collectives on its group, because all ranks must post them in the same order.
// A collective in flight counts as reading its arguments and writing its results until its wait.
class Dependencies {
 public:
  // Any: data dependences only. A pass that then reorders collectives must choose the same order on all ranks.
  enum class Collectives : uint8_t { InOrder, Any };
  explicit Dependencies(const Program& program, Collectives collectives = Collectives::InOrder);
  const std::vector<int32_t>& before(size_t node) const { return before_[node]; }
  const std::vector<int32_t>& after(size_t node) const { return after_[node]; }

 private:
  std::vector<std::vector<int32_t>> before_, after_;
};

// Permutes the nodes into `order`. Throws InternalError if the order violates a dependence, and names the two nodes.
void reorder(Program& program, const std::vector<int32_t>& order,
             Dependencies::Collectives collectives = Dependencies::Collectives::InOrder);

// The live range of a buffer.
struct Lifetime {
  int32_t first = -1, last = -1;  // first and last node that use the buffer; -1: none does
};
// By buffer.
std::vector<Lifetime> lifetimes(const Program& program);
// By node, the buffers it uses. A wait also uses the buffers of the collective it waits for.
std::vector<std::vector<int32_t>> used_buffers(const Program& program);

}  // namespace tessera::compiler
