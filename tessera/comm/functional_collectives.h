#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

// The functional collectives (PyTorch: torch.distributed._functional_collectives, "funcol"). Each one returns a new
// tensor. The tensor is pending on its group: call wait() before you read it. The in-place collectives are in
// comm/collectives.h.
//
// Each collective is a registered op (`tessera::all_reduce`, ...) that takes the group as an argument, so the tracer,
// debug mode and the profiler see it. The collectives are not differentiable: redistribution has its own autograd.
// Ranks may have different sizes: `sizes[r]` is the size of rank r along `dim`.
//
// Example:
//   at::Tensor sum = ts::funcol::all_reduce(x, ts::ReduceOp::Sum, mesh.get_group("dp"));
//   ...                                                // runs while the collective is in flight
//   ts::funcol::wait(sum, mesh.get_group("dp"));
namespace tessera::funcol {

// Reduces x over the ranks.
// tessera::all_reduce(Tensor x, str op, Group group) -> Tensor
at::Tensor all_reduce(const at::Tensor& x, ReduceOp op, const comm::Group& group);

// Reduces several tensors in one collective.
// tessera::all_reduce_coalesced(Tensor[] xs, str op, Group group) -> Tensor[]
std::vector<at::Tensor> all_reduce_coalesced(at::TensorList xs, ReduceOp op, const comm::Group& group);

// Concatenates x of every rank along dim. Requires: x.size(dim) == sizes[rank].
// tessera::all_gather(Tensor x, int dim, int[] sizes, Group group) -> Tensor
at::Tensor all_gather(const at::Tensor& x, int64_t dim, at::IntArrayRef sizes, const comm::Group& group);
// Several tensors in one collective. `sizes` is the concatenation of the sizes of all tensors.
std::vector<at::Tensor> all_gather_coalesced(at::TensorList xs, at::IntArrayRef dims, at::IntArrayRef sizes,
                                             const comm::Group& group);

// Reduces x over the ranks and returns this rank's part along dim. Requires: x.size(dim) == sum(sizes).
// tessera::reduce_scatter(Tensor x, int dim, int[] sizes, str op, Group group) -> Tensor
at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, at::IntArrayRef sizes, ReduceOp op,
                          const comm::Group& group);
// Several tensors in one collective. `sizes` is the concatenation of the sizes of all tensors.
std::vector<at::Tensor> reduce_scatter_coalesced(at::TensorList xs, at::IntArrayRef dims, at::IntArrayRef sizes,
                                                 ReduceOp op, const comm::Group& group);

// Splits x along split_dim into split_sizes, sends part r to rank r, and concatenates the received parts along cat_dim.
// cat_sizes[r] is the size along cat_dim of the part from rank r. That is the size of its x, unless
// split_dim == cat_dim.
// tessera::all_to_all(Tensor x, int split_dim, int[] split_sizes, int cat_dim, int[] cat_sizes, Group group) -> Tensor
at::Tensor all_to_all(const at::Tensor& x, int64_t split_dim, at::IntArrayRef split_sizes, int64_t cat_dim,
                      at::IntArrayRef cat_sizes, const comm::Group& group);

// Returns x of rank `source` on every rank. `source` counts within the group.
// tessera::broadcast(Tensor x, int source, Group group) -> Tensor
at::Tensor broadcast(const at::Tensor& x, int64_t source, const comm::Group& group);

// Waits until `x` can be read. `x` is a result of a collective above on `group`, or a view of one. Returns at once for
// other tensors.
// tessera::wait(Tensor(a!) x, Group group) -> Tensor(a!)
void wait(const at::Tensor& x, const comm::Group& group);

}  // namespace tessera::funcol
