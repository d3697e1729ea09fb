#pragma once
#include "tessera/base/visit.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"

// Tensors that are cut like a unit's parameters, gathered: gradients, rows of optimizers.
namespace tessera::data_parallel::fsdp {

// A tensor like the unit's shard with these pieces, one a member, in their places, and zeros where there is none.
at::Tensor shard_of_pieces(const Unit& unit, const Tensors& pieces, c10::ScalarType dtype);

// Every rank's, one after the other: all of a flat parameter. All ranks of the unit's group call it.
at::Tensor gather_shard(const Unit& unit, const at::Tensor& shard);
// A member in it, as this rank computes with it. Requires: a flat layout.
at::Tensor whole_in(const Unit& unit, size_t i, const at::Tensor& gathered);

// A whole member's like, as this rank computes with it: where members lie over other axes, so does this.
at::Tensor as_whole(const Member& member, const at::Tensor& local);

// Of each number the largest that a rank of the unit's group has.
at::Tensor largest_of_all_ranks(const Unit& unit, const at::Tensor& values);

}  // namespace tessera::data_parallel::fsdp
