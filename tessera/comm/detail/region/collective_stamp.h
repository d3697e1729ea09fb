#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/region.h"

#include <cstdint>
#include <string>

namespace tessera::comm::region {

// The stamp of what this thread is posting: as the Communicator says (detail/posting.h), else, for a caller that uses
// the backend directly, `kind` and its `call`-th call.
Stamp stamp_of(Kind kind, c10::ScalarType dtype, uint64_t call);

std::string describe(const Stamp& stamp);  // "allreduce_ #4 ('wq.grad') of Float"

// What two ranks posted, if it cannot be the same collective:  "rank 0 posted ..., rank 1 posted ..."; else "".
std::string difference(const Stamp& mine, const Stamp& theirs, int64_t my_rank, int64_t their_rank);

}  // namespace tessera::comm::region
