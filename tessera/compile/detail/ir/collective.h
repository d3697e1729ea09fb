#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/compile/detail/ir/program.h"

namespace tessera::compiler {

// What a collective of a program sends, in the form of the communication record of the call (comm/detail/records.h).
// So a listing, the page of a compile trace and the records of a run can be compared line by line.
struct Collective {
  comm::CommKind kind = comm::CommKind::Count;  // Count: an op that is not in the table of collective.cpp
  int64_t bytes = 0;                            // of the unsharded tensor, padding included
  int32_t group = -1;                           // index into Program::groups
  bool operator==(const Collective&) const = default;
};

comm::CommKind record_kind(const c10::OperatorHandle& op);
// Why the dims and shard sizes of a collective do not match its tensors and its group; "" if they do. verify() asks.
// Requires: the arguments match the schema.
std::string collective_error(const Program& program, const Node& node);
// Requires: kind_of(node) is OpKind::Collective, and collective_error() is "". A number of bytes that exceeds 2^63 is
// the largest integer.
Collective collective_of(const Program& program, const Node& node);

// The node that waits for the collective `node`: the first later wait on a buffer that the collective writes.
// nodes.size() if no wait follows.
size_t wait_of(const Program& program, size_t node);

}  // namespace tessera::compiler
