#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

// The functional collectives, each a registered op (`tessera::all_reduce`, ...; the group travels as an argument), so
// that tracer, debug mode and profiler see it. Each returns a fresh tensor that may only be read after wait(): until
// then it is pending on its group. None is differentiable: redistribution has its own autograd.
// Sizes that differ between ranks are handled here, once: `sizes[r]` is rank r's extent along `dim`.
namespace tessera::funcol {

// tessera::all_reduce(Tensor x, str op, Group group) -> Tensor
at::Tensor all_reduce(const at::Tensor& x, ReduceOp op, const comm::Group& group);

// tessera::all_reduce_coalesced(Tensor[] xs, str op, Group group) -> Tensor[]     one collective for all
std::vector<at::Tensor> all_reduce_coalesced(at::TensorList xs, ReduceOp op, const comm::Group& group);

// Concatenates every rank's x along dim. Requires x.size(dim) == sizes[rank].
// tessera::all_gather(Tensor x, int dim, int[] sizes, Group group) -> Tensor
at::Tensor all_gather(const at::Tensor& x, int64_t dim, at::IntArrayRef sizes, const comm::Group& group);
std::vector<at::Tensor> all_gather_coalesced(at::TensorList xs, at::IntArrayRef dims, at::IntArrayRef sizes,
                                             const comm::Group& group);  // sizes: xs.size() rows of group size

// Reduces x over the ranks and keeps this rank's part along dim. Requires x.size(dim) == sum(sizes).
// tessera::reduce_scatter(Tensor x, int dim, int[] sizes, str op, Group group) -> Tensor
at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, at::IntArrayRef sizes, ReduceOp op,
                          const comm::Group& group);
std::vector<at::Tensor> reduce_scatter_coalesced(at::TensorList xs, at::IntArrayRef dims, at::IntArrayRef sizes,
                                                 ReduceOp op, const comm::Group& group);

// Cuts x along split_dim into split_sizes, sends piece r to rank r, concatenates what arrives along cat_dim.
// cat_sizes[r] is the extent along cat_dim of what rank r sends here: its whole x, unless split_dim == cat_dim.
// tessera::all_to_all(Tensor x, int split_dim, int[] split_sizes, int cat_dim, int[] cat_sizes, Group group) -> Tensor
at::Tensor all_to_all(const at::Tensor& x, int64_t split_dim, at::IntArrayRef split_sizes, int64_t cat_dim,
                      at::IntArrayRef cat_sizes, const comm::Group& group);

// tessera::broadcast(Tensor x, int source, Group group) -> Tensor
at::Tensor broadcast(const at::Tensor& x, int64_t source, const comm::Group& group);

// Returns once `x`, a result of one of the above on `group`, may be read. A tensor that is not pending is fine.
// tessera::wait(Tensor(a!) x, Group group) -> Tensor(a!)
void wait(const at::Tensor& x, const comm::Group& group);

}  // namespace tessera::funcol
