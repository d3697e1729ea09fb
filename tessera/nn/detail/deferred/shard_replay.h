#pragma once
#include "tessera/nn/detail/deferred/tape.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <vector>

// Decides which recorded ops can run on the local shard of a tensor only, and computes their local arguments.
//
// Every value of such ops has the sizes of the target, and is stored as a local shard. The exception is a select() of
// one index, which exists only on the rank that owns the index. The result must be bitwise equal to a run on one rank.
// Therefore only fills, copies and arithmetic that IEEE 754 rounds in one way are supported. exp, cos and pow are not:
// the vectorized code of LibTorch and its code for remaining elements can differ in the last bit, and a shard has other
// remaining elements than the full tensor.
namespace tessera::detail::deferred {

// Whether all `ops` can run on local shards of a tensor with these global sizes.
bool can_replay_on_shard(const Tape& tape, const std::vector<Id>& ops, c10::IntArrayRef sizes);

// Replaces global arguments by local ones. False: this rank has nothing to do, because another rank owns the index.
bool localize_arguments(const RecordedOp& op, const TensorSpec& spec, std::vector<c10::IValue>& arguments);

}  // namespace tessera::detail::deferred
