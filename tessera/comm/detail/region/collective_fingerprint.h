#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/region.h"

#include <cstdint>
#include <string>

namespace tessera::comm::region {

// The fingerprint of the collective that this thread posts. It comes from the Communicator
// (detail/current_collective.h). For a caller that uses the backend directly it is `kind` with sequence number `call`.
CollectiveFingerprint fingerprint_of(CommKind kind, c10::ScalarType dtype, uint64_t call);

std::string describe(const CollectiveFingerprint& fingerprint);  // "allreduce_ #4 ('wq.grad') of Float"

// If two fingerprints cannot be the same collective: "rank 0 posted ..., rank 1 posted ...". Else "".
std::string difference(const CollectiveFingerprint& mine, const CollectiveFingerprint& theirs, int64_t my_rank,
                       int64_t their_rank);

}  // namespace tessera::comm::region
