#pragma once
#include "tessera/base/visit.h"
#include "tessera/comm/communicator.h"
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"
#include "tessera/data_parallel/fsdp/wrap_policy.h"
#include "tessera/mesh/device_mesh.h"

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <vector>

// What FullyShardedDataParallel can be told, under PyTorch's names.
namespace tessera {

using data_parallel::fsdp::BackwardPrefetch;

enum class ShardingStrategy : uint8_t {
  FullShard,         // parameters, gradients, optimizer state cut; gathered for forward, again for backward
  ShardGradOp,       // gathered once, kept until backward is through
  NoShard,           // whole everywhere: gradients are averaged
  HybridShard,       // FullShard over the mesh's last axis, copies over its first
  HybridShardZero2,  // ShardGradOp, likewise
};
std::ostream& operator<<(std::ostream& out, ShardingStrategy strategy);

struct MixedPrecision {
  std::optional<c10::ScalarType> param_dtype = {};   // forward and backward compute in it; the shard keeps its own
  std::optional<c10::ScalarType> reduce_dtype = {};  // gradients are reduced in it; none: param_dtype
  std::optional<c10::ScalarType> buffer_dtype = {};  // buffers are turned into it, once
  bool keep_low_precision_grads = false;             // gradients stay in the dtype they were reduced in
  bool cast_forward_inputs = false;                  // floating inputs of every unit become param_dtype
  bool cast_root_forward_inputs = true;              // those of the outermost unit do
};

struct FSDPOptions {
  DeviceMesh device_mesh = {};  // one axis; two for the hybrid strategies
  comm::Group process_group = {};
  ShardingStrategy sharding_strategy = ShardingStrategy::FullShard;
  bool offload_params = false;  // the shard, its gradient and optimizer state live on the CPU
  bool use_orig_params = false;
  bool sync_module_states = false;  // parameters and buffers are the first rank's

  AutoWrapPolicy auto_wrap_policy = {};  // these modules, each by itself and with the same options, and then the rest
  std::vector<const torch::nn::Module*> ignored_modules = {};  // with all that is in them
  Tensors ignored_parameters = {};
  MixedPrecision mixed_precision = {};
  std::optional<c10::Device> device_id = {};  // where parameters and buffers are brought before they are cut

  bool forward_prefetch = true;  // the next unit is gathered while this one computes
  BackwardPrefetch backward_prefetch = BackwardPrefetch::Pre;
  bool limit_all_gathers = true;  // one unit ahead, not two
};

}  // namespace tessera
