#pragma once
#include "tessera/mesh/device_mesh.h"

#include <torch/nn/module.h>

#include <limits>
#include <memory>

namespace tessera {

// The gradient of a batch whose rows are on several ranks, with bits that do not depend on the number of ranks.
// The global batch is `count` virtual shards of equal size. Each rank has consecutive ones, and computes them one after
// the other. A gradient is the sum over all virtual shards in one fixed binary tree (docs/design/numerics.md).
//
//   ts::fully_shard(model, {.mesh = mesh["dp"]});                  // or replicate, or DistributedDataParallel
//   ts::VirtualShards shards(*model, mesh["dp"]);
//   const ts::NumericsScope scope(ts::Numerics::Invariant);
//   optimizer.zero_grad();
//   for (int64_t i = 0; i < shards.local_count(); i++) {
//     auto loss = loss_sum(model(shards.rows(x, i)), shards.rows(y, i)) / rows_of_global_batch;
//     loss.backward();
//     shards.add_gradients();
//   }
//   shards.reduce_gradients();                                     // .grad is the sum over all ranks
//   optimizer.step();
//
// The sum is not divided by the number of ranks: 1/3 is not exact.
//
// With at_once > 1 a pass of the loop computes up to that many virtual shards: same bits, less time, more memory. Then
// the loss must be a sum over rows, times a number; dim 0 of activations is the batch, also where it is flattened. The
// first step computes one virtual shard at a time, and then some of them again at once, and compares the bits. Make
// this step without compile().
class VirtualShards {
 public:
  // The number of virtual shards if none is given: each of 2, 3, 4, 6, 8, 12 or 24 ranks has the same number.
  static constexpr int64_t kCount = 24;
  // at_once: all virtual shards of a rank.
  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  // `data_mesh` has the ranks with different rows, in the order of the rows; a mesh without state: one rank has all.
  // fully_shard() at and below `module` no longer reduces gradients, and keeps unsharded parameters until the optimizer
  // changes them. Requires: replicate() and DistributedDataParallel do not reduce either (no_sync()); inside the scope
  // their reduction throws. Throws UsageError if `count` is not divisible by the ranks, and for
  // FullyShardedDataParallel. `at_once`: the most virtual shards in a pass.
  // `context_mesh`: a 1-D mesh whose ranks have parts of the tokens of each row, one after the other (ContextParallel
  // with Ulysses). Sums over tokens gather them, so gradients and losses are those of all tokens.
  VirtualShards(torch::nn::Module& module, const DeviceMesh& data_mesh, int64_t count = kCount, int64_t at_once = 1,
                const DeviceMesh& context_mesh = {});
  ~VirtualShards();
  VirtualShards(const VirtualShards&) = delete;

  // Virtual shards of the global batch.
  int64_t count() const;
  // The passes of this step on this rank: one per virtual shard, or fewer if at_once > 1 after the first step.
  int64_t local_count() const;
  // The index of this rank's first virtual shard in the global batch.
  int64_t first() const;
  // The rows of pass i of this rank's rows. Begins the pass; call it before the forward, for each tensor of the batch.
  // Throws UsageError if the rows cannot be divided.
  at::Tensor rows(const at::Tensor& rows_of_rank, int64_t i) const;
  // With a context mesh: whether pass i computes full rows, outside of a ContextParallel. Otherwise shard the rows over
  // it. One pass of the first step does, and the next is compared with it.
  bool takes_full_rows(int64_t i) const;

  // After the backward of a pass: takes .grad of each parameter. Throws UsageError for a parameter that
  // requires a gradient and has none, or has that of the last step too; and if virtual shards at once have other bits
  // than one by one. Call zero_grad() before the first one.
  void add_gradients();
  // After the last pass, on every rank: sets .grad to the sum over all virtual shards. Parameters of
  // fully_shard() get their shard of it.
  void reduce_gradients();
  // The sum over all virtual shards, on every rank, of values (local_count, ...), one per pass of the step: the losses,
  // before they are multiplied by a number. Call it after reduce_gradients().
  at::Tensor sum(const at::Tensor& values) const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace tessera
