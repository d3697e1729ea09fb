#pragma once
#include "tessera/checkpoint/detail/manifest.h"

#include <string>
#include <vector>

namespace tessera::dcp {

// The global save plan (DCP: create_global_plan), from the local boxes of every rank. Pure. Each box is written once:
// by the rank that has it and has the fewest bytes to write so far, largest boxes first. So replicas share the work.
//
//   local boxes by rank                written
//   0: w[0:2], b    1: w[2:4], b       shard-00001-...: w[0:2]      shard-00002-...: w[2:4], b
//   2: w[0:2], b    3: w[2:4], b       shard-00003-...: nothing, so this file does not exist
//
// A file has each tensor name once, so a rank's second box of a tensor goes into a second file. File names are those of
// DCP: shard-RANK-model-I-of-N.safetensors, counted from 1.
// Takes the local manifest of each rank, whose shards have no file names. The values are those of the first rank.
// Throws UsageError if a tensor differs between ranks in dtype or sizes, and if its boxes do not cover it exactly once.
Manifest plan_save(const std::vector<Manifest>& local_manifests);

// Whether this rank writes the file.
bool writes(int64_t rank, const std::string& file);

}  // namespace tessera::dcp
