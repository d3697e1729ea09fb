#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"

#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace tessera::data_parallel::fsdp {

at::Tensor shard_of_pieces(const Unit& unit, const Tensors& pieces, c10::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  auto shard = at::zeros({unit.layout().shard_numel()}, at::TensorOptions(unit.device()).dtype(dtype));
  for (size_t i = 0; i < pieces.size(); i++) {
    if (!pieces[i].defined() || local_value(pieces[i]).numel() == 0) continue;
    const auto place = unit.layout().in_shard(i, unit.shards()->rank());
    shard.narrow(0, place.begin, place.size).copy_(local_value(pieces[i]).detach().reshape({-1}));
  }
  return shard;
}

at::Tensor gather_shard(const Unit& unit, const at::Tensor& shard) {
  const auto own = shard.detach().to(unit.device());
  if (unit.shards()->size() == 1) return own;
  auto all = at::empty({unit.layout().shard_numel() * unit.layout().ranks()}, own.options());
  comm::all_gather_into_(all, own, unit.shards());
  funcol::wait(all, unit.shards());
  return all;
}

at::Tensor whole_in(const Unit& unit, size_t i, const at::Tensor& gathered) {
  const auto& layout = unit.layout();
  const auto sizes = layout.sizes(i);
  int64_t rank = 0;  // the first that has a part of it, which is its beginning
  while (rank < layout.ranks() && layout.in_shard(i, rank).size == 0) rank++;
  if (rank == layout.ranks()) return at::empty(sizes, gathered.options());  // of no elements
  const int64_t begin = rank * layout.shard_numel() + layout.in_shard(i, rank).begin;
  return gathered.narrow(0, begin, c10::multiply_integers(sizes)).view(sizes);
}

at::Tensor as_whole(const Member& member, const at::Tensor& local) {
  if (!member.outer) return local;
  const auto& outer = *member.outer;
  return tessera::detail::wrap(
      local, intern(outer.mesh, outer.placements, outer.sizes, outer.strides, local.scalar_type(), local.device()));
}

at::Tensor largest_of_all_ranks(const Unit& unit, const at::Tensor& values) {
  if (unit.shards()->size() == 1) return values;
  auto all = values.to(unit.device(), values.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  comm::all_reduce_(all, ReduceOp::Max, unit.shards());
  funcol::wait(all, unit.shards());
  return all.cpu();
}

}  // namespace tessera::data_parallel::fsdp
