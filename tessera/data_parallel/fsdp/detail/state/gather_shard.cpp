#include "tessera/data_parallel/fsdp/detail/state/gather_shard.h"

#include "tessera/comm/detail/inplace_ops.h"
#include "tessera/comm/functional_collectives.h"
#include "tessera/data_parallel/detail/local_gradient.h"
#include "tessera/dtensor/dtensor.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

namespace tessera::data_parallel::fsdp {

at::Tensor make_shard(const ParamGroup& group, const Tensors& local_shards, c10::ScalarType dtype) {
  const at::NoGradGuard no_grad;
  auto shard = at::zeros({group.layout().shard_numel()}, at::TensorOptions(group.device()).dtype(dtype));
  for (size_t i = 0; i < local_shards.size(); i++) {
    if (!local_shards[i].defined() || local_or_self(local_shards[i]).numel() == 0) continue;
    const auto range = group.layout().range_in_shard(i, group.shard_group()->rank());
    shard.narrow(0, range.begin, range.size).copy_(local_or_self(local_shards[i]).detach().reshape({-1}));
  }
  return shard;
}

at::Tensor gather_shard(const ParamGroup& group, const at::Tensor& shard) {
  const auto own = shard.detach().to(group.device());
  if (group.shard_group()->size() == 1) return own;
  auto all = at::empty({group.layout().shard_numel() * group.layout().ranks()}, own.options());
  comm::all_gather_into_(all, own, group.shard_group());
  funcol::wait(all, group.shard_group());
  return all;
}

at::Tensor param_in_gathered(const ParamGroup& group, size_t i, const at::Tensor& gathered) {
  const auto& layout = group.layout();
  const auto sizes = layout.sizes(i);
  int64_t rank = 0;  // the first rank whose shard has elements of the parameter
  while (rank < layout.ranks() && layout.range_in_shard(i, rank).size == 0) rank++;
  if (rank == layout.ranks()) return at::empty(sizes, gathered.options());  // it has no elements
  const int64_t begin = rank * layout.shard_numel() + layout.range_in_shard(i, rank).begin;
  return gathered.narrow(0, begin, c10::multiply_integers(sizes)).view(sizes);
}

at::Tensor max_over_ranks(const ParamGroup& group, const at::Tensor& values) {
  if (group.shard_group()->size() == 1) return values;
  auto all = values.to(group.device(), values.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  comm::all_reduce_(all, ReduceOp::Max, group.shard_group());
  funcol::wait(all, group.shard_group());
  return all.cpu();
}

}  // namespace tessera::data_parallel::fsdp
