#pragma once
#include "tessera/compile/detail/ir/program.h"

#include <vector>

namespace tessera::compiler {

// Collectives of one kind as one coalesced collective, with one result per member:
//
//   %2 = tessera.all_reduce(%0, "sum", @tp)
//   %4 = tessera.all_reduce(%1, "sum", @tp)     ->     [%2, %4] = tessera.all_reduce_coalesced([%0, %1], "sum", @tp)
//
// For tessera.all_gather, all_reduce and reduce_scatter. `like`: the member whose remaining arguments and module name
// the new node gets.
Node coalesced_collective(const Program& program, const std::vector<size_t>& members, size_t like);

}  // namespace tessera::compiler
