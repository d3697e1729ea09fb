#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/collectives.h"
#include "tessera/data_parallel/fsdp/detail/api/wrap_policy.h"
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"
#include "tessera/mesh/device_mesh.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

// Options of FullyShardedDataParallel, with PyTorch's names.
namespace tessera {

// When backward all-gathers the next parameters: None, Pre or Post (PyTorch: BackwardPrefetch).
using data_parallel::fsdp::BackwardPrefetch;

// How parameters, gradients and optimizer state are distributed (PyTorch: ShardingStrategy).
enum class ShardingStrategy : uint8_t {
  FullShard,         // all are sharded; parameters are all-gathered for forward and again for backward
  ShardGradOp,       // all are sharded; parameters stay unsharded from forward to the end of backward
  NoShard,           // all are replicated and gradients are averaged, as in DDP
  HybridShard,       // FullShard over the mesh's last axis, replicated over its first
  HybridShardZero2,  // ShardGradOp over the mesh's last axis, replicated over its first
};
// Prints PyTorch's name: FULL_SHARD.
std::ostream& operator<<(std::ostream& out, ShardingStrategy strategy);

// Dtypes of parameters, gradients, buffers and inputs (PyTorch: MixedPrecision).
struct MixedPrecision {
  std::optional<c10::ScalarType> param_dtype = {};   // of the unsharded parameters; the shard keeps its dtype
  std::optional<c10::ScalarType> reduce_dtype = {};  // of the gradient reduction; none: param_dtype
  std::optional<c10::ScalarType> buffer_dtype = {};  // buffers are converted to it once
  bool keep_low_precision_grads = false;             // gradients keep the dtype of the reduction
  bool cast_forward_inputs = false;                  // casts floating-point inputs of every wrapped module
  bool cast_root_forward_inputs = true;              // casts floating-point inputs of the root module
};

// Options of FullyShardedDataParallel.
struct FSDPOptions {
  DeviceMesh device_mesh = {};  // one axis; two for the hybrid strategies. None: process_group, or all ranks
  GroupRef process_group = {};  // ranks to shard over, instead of device_mesh
  ShardingStrategy sharding_strategy = ShardingStrategy::FullShard;  // see ShardingStrategy
  bool offload_params = false;      // shards, their gradients and optimizer state are on the CPU
  bool use_orig_params = false;     // parameters() returns the original parameters, not one flat parameter per module
  bool sync_module_states = false;  // broadcasts parameters and buffers from rank 0

  AutoWrapPolicy auto_wrap_policy = {};  // wraps the chosen inner modules with the same options, then the module
  std::vector<const torch::nn::Module*> ignored_modules = {};  // not sharded, with all modules below them
  Tensors ignored_parameters = {};                             // not sharded
  MixedPrecision mixed_precision = {};                         // see MixedPrecision
  std::optional<c10::Device> device_id = {};  // parameters and buffers are moved to it before they are sharded

  bool forward_prefetch = true;  // all-gathers the next module's parameters while this one computes
  BackwardPrefetch backward_prefetch = BackwardPrefetch::Pre;  // the same in backward
  bool limit_all_gathers = true;                               // prefetches one module ahead, not two
};

}  // namespace tessera
