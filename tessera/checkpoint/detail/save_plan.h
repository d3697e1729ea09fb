#pragma once
#include "tessera/checkpoint/detail/manifest.h"

#include <string>
#include <vector>

namespace tessera::dcp {

// Who writes what, from what every rank holds. Pure. Each box is written once, by the one of its holders that has the
// least to write so far, largest boxes first; so replicas share the work.
//
//   holds, by rank                     written
//   0: w[0:2], b    1: w[2:4], b       shard-00001-...: w[0:2]      shard-00002-...: w[2:4], b
//   2: w[0:2], b    3: w[2:4], b       shard-00003-...: nothing, so there is no such file
//
// A file has a name once, so a rank's second box of a tensor goes into a second file: the names are those of DCP,
// shard-RANK-model-I-of-N.safetensors, counted from 1.
// Takes: a manifest of each rank, whose pieces have no files. The values are the first's.
// Throws UsageError for tensors that differ between ranks in dtype or sizes, and for those whose boxes do not make them
// up.
Manifest plan_save(const std::vector<Manifest>& held_by_rank);

// Does this rank write the file?
bool writes(int64_t rank, const std::string& file);

}  // namespace tessera::dcp
