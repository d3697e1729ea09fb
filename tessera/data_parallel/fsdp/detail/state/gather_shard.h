#pragma once
#include "tessera/base/visit.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"

// Gathers tensors that are sharded like the parameters of a group: gradients and optimizer state.
namespace tessera::data_parallel::fsdp {

// A buffer laid out like the group's shard with these local shards, one per parameter. Undefined ones become zeros.
at::Tensor make_shard(const ParamGroup& group, const Tensors& local_shards, c10::ScalarType dtype);

// The shards of all ranks one after the other: the complete flat parameter. All ranks of the shard group call it.
at::Tensor gather_shard(const ParamGroup& group, const at::Tensor& shard);
// Parameter i in the result of gather_shard(), with its unsharded shape. Requires: a flat layout.
at::Tensor param_in_gathered(const ParamGroup& group, size_t i, const at::Tensor& gathered);

// The elementwise maximum over the ranks of the shard group. All of them call it.
at::Tensor max_over_ranks(const ParamGroup& group, const at::Tensor& values);

}  // namespace tessera::data_parallel::fsdp
