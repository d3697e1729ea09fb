#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// What a collective of a program sends, as the record of the call will say it (comm/records.h): so a listing, a page of
// a trace and the records of a run can be compared line by line.
struct Collective {
  comm::Kind kind = comm::Kind::Count;  // Count: an op that has no row in collective.cpp
  int64_t bytes = 0;                    // the tensor as it is when whole, padding included
  int32_t group = -1;                   // of Program::groups
  bool operator==(const Collective&) const = default;
};

comm::Kind record_kind(const c10::OperatorHandle& op);
// Requires: kind_of(node) is OpKind::Collective.
Collective collective_of(const Program& program, const Node& node);

// The node that waits for collective `node`: the first behind it that waits for memory it writes; nodes.size(): none.
size_t wait_of(const Program& program, size_t node);

}  // namespace tessera::compiler
