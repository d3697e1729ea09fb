#pragma once
#include "tessera/comm/communicator.h"
#include "tessera/numerics/detail/kernels.h"

#include <ATen/core/ivalue.h>

#include <functional>
#include <vector>

// An op that sums over a dim, on plain tensors or DTensors. On DTensors each rank computes the complete subtrees of its
// terms, the ranks that shard the dim gather them, and every rank adds the rest of the tree. No result is partial.
// Where a shard is not a range of complete leaves, the inputs are gathered instead: the same bits, more communication.
namespace tessera::numerics {

// The op, as the sharding rules know it, and its arguments.
struct SummedOp {
  const char* op;  // "aten::mm"
  std::vector<c10::IValue> args;
  std::vector<int64_t> dims;  // the summed dim of each tensor argument
  int tensor = 0;             // the tensor argument whose shards of this dim count
  int64_t dim() const { return dims[static_cast<size_t>(tensor)]; }
};

// The complete subtrees of this rank, (subtrees, local sizes of the result). `result_dim0`: the global indices of dim 0
// of the result that this rank has.
using SubtreeKernel =
    std::function<at::Tensor(const std::vector<at::Tensor>& locals, const Terms& terms, IndexRange result_dim0)>;

// `result_dim0_size`: of the global result.
at::Tensor sum_over_mesh(const SummedOp& call, int64_t result_dim0_size, const SubtreeKernel& kernel);

// x of one rank + x of the other. A sum of two has one order, so an all-reduce has its bits.
at::Tensor sum_over_two_ranks(const at::Tensor& x, const comm::Group& group);

}  // namespace tessera::numerics
