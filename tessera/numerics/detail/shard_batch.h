#pragma once
#include "tessera/numerics/detail/kernels.h"

#include <string>
#include <vector>

// Several virtual shards that are computed at once, in one forward and backward, with the bits of one at a time.
//
// Ops whose sums stay inside of a virtual shard give equal bits, because rows are independent. A sum over the batch is
// the sum of each virtual shard, and then their node of the tree over virtual shards (nested_steps). Which sums these
// are is found from sizes: a pass over one virtual shard records the number of terms of each sum of the step, in order.
// In a pass over n of them a sum has the same number of terms, or n times as many.
namespace tessera::numerics {

struct RecordedSum {
  std::string op;
  int64_t terms;
  bool operator==(const RecordedSum&) const = default;
};

// A gradient of a tied weight, which is summed apart from the gradients of its other uses (separate_use).
struct SeparateGradient {
  const void* weight;  // its TensorImpl
  at::Tensor gradient;
};

// One pass of VirtualShards. It is open on one thread.
struct ShardBatch {
  int64_t count = 0;                       // virtual shards of the global batch
  IndexRange shards{0, 0};                 // of this pass: a node of the tree over them
  bool several = false;                    // other passes of this run compute several virtual shards
  const std::vector<RecordedSum>* known;   // the sums of one virtual shard, for a pass over several
  std::vector<RecordedSum> recorded = {};  // by this pass
  std::vector<SeparateGradient> separate = {};
  bool at_once() const { return shards.end - shards.begin > 1; }
};
// The pass that is open on this thread, or null.
ShardBatch*& open_shard_batch();

// The order of the next sum of this thread, over a dim that has all `n` terms. Throws UsageError if it is not a sum of
// the recorded step.
Terms terms_of_next_sum(const char* op, int64_t n);

// The weight, for a use besides that as the embedding. Inside of a pass its gradient is summed over virtual shards
// apart from that of the other use, so that the bits do not depend on how many are computed at once.
at::Tensor separate_use(const at::Tensor& weight);

}  // namespace tessera::numerics
