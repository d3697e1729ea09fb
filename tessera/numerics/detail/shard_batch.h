#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/numerics/detail/kernels.h"

#include <string>
#include <vector>

// Several virtual shards that are computed at once, in one forward and backward, with the bits of one at a time.
//
// Ops whose sums stay inside of a virtual shard give equal bits, because rows are independent. A sum over the batch is
// the sum of each virtual shard, and then their node of the tree over virtual shards (nested_steps). Which sums these
// are is found from sizes: a pass over one virtual shard records the number of terms of each sum of the step, in order.
// In a pass over n of them a sum has the same number of terms, or n times as many.
//
// Context parallelism: ranks have parts of the tokens of each row. Which sums are over tokens is found the same way: a
// pass over full rows, on every rank, has more terms there. The terms of all ranks are gathered before such a sum.
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
  int64_t count = 0;                                       // virtual shards of the global batch
  IndexRange shards{0, 0};                                 // of this pass: a node of the tree over them
  bool several = false;                                    // other passes of this run compute several virtual shards
  const std::vector<RecordedSum>* known;                   // the sums of one virtual shard, for a pass over several
  const std::vector<RecordedSum>* of_full_rows = nullptr;  // the same with all tokens; null: a rank has full rows
  comm::Group context = {};                                // whose ranks have parts of the tokens, in order
  int64_t tokens = 0;                                      // of a row, on this rank
  std::vector<RecordedSum> recorded = {};                  // by this pass
  std::vector<SeparateGradient> separate = {};
  bool at_once() const { return shards.end - shards.begin > 1; }
};
// The pass that is open on this thread, or null.
ShardBatch*& open_shard_batch();

// A sum over a dim.
struct NextSum {
  Terms terms;
  comm::Group context = {};  // not null: gather_tokens() first
  int64_t tokens = 0;
};
// The order of the next sum of this thread, over a dim of which this rank has `n` terms: all, or those of its tokens.
// Throws UsageError if it is not a sum of the recorded step.
NextSum next_sum(const char* op, int64_t n);

// x with the tokens of all ranks along `dim`, which has `tokens` per row of the batch: row by row, in their order.
at::Tensor gather_tokens(const at::Tensor& x, int64_t dim, const NextSum& sum);

// The weight, for a use besides that as the embedding. Inside of a pass its gradient is summed over virtual shards
// apart from that of the other use, so that the bits do not depend on how many are computed at once.
at::Tensor separate_use(const at::Tensor& weight);

}  // namespace tessera::numerics
