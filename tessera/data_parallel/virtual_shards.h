#pragma once
#include "tessera/mesh/device_mesh.h"

#include <torch/nn/module.h>

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
class VirtualShards {
 public:
  // The number of virtual shards if none is given: each of 2, 3, 4, 6, 8, 12 or 24 ranks has the same number.
  static constexpr int64_t kCount = 24;

  // `data_mesh` has the ranks with different rows, in the order of the rows; a mesh without state: one rank has all.
  // fully_shard() at and below `module` no longer reduces gradients, and keeps unsharded parameters until the optimizer
  // changes them. Requires: replicate() and DistributedDataParallel do not reduce either (no_sync()); inside the scope
  // their reduction throws. Throws UsageError if `count` is not divisible by the ranks, and for
  // FullyShardedDataParallel.
  VirtualShards(torch::nn::Module& module, const DeviceMesh& data_mesh, int64_t count = kCount);
  ~VirtualShards();
  VirtualShards(const VirtualShards&) = delete;

  // Virtual shards of the global batch, and of this rank.
  int64_t count() const;
  int64_t local_count() const;
  // The index of this rank's first virtual shard in the global batch.
  int64_t first() const;
  // The rows of local virtual shard i of this rank's rows. Throws UsageError if the rows cannot be divided.
  at::Tensor rows(const at::Tensor& rows_of_rank, int64_t i) const;

  // After the backward of a virtual shard: takes .grad of each parameter. Throws UsageError for a parameter that
  // requires a gradient and has none, or has that of the last step too. Call zero_grad() before the first one.
  void add_gradients();
  // After the last local virtual shard, on every rank: sets .grad to the sum over all virtual shards. Parameters of
  // fully_shard() get their shard of it.
  void reduce_gradients();
  // The sum over all virtual shards, on every rank, of values (local_count, ...): the losses.
  at::Tensor sum(const at::Tensor& values) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
