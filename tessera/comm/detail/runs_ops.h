#pragma once
#include "tessera/base/reduce_op.h"
#include "tessera/comm/detail/runs.h"

// Collectives of runs (runs.h) with results that are pending until wait(x, group), as those of inplace_ops.h. In a step
// that is compiled they are registered ops, which a program can hold; elsewhere they are called as they are.
namespace tessera::comm {

// Each of `outs` is pending.
// tessera::all_gather_into_runs_(Tensor(a!)[] outs, Tensor part, int[] runs, str label, Group group) -> ()
void all_gather_into_runs_(const std::vector<at::Tensor>& outs, const at::Tensor& part, const Runs& runs,
                           const Group& group);

// tessera::reduce_scatter_runs_into_(Tensor(a!) out, Tensor[] ins, int[] runs, str op, str label, Group group)
//     -> Tensor(a!)
void reduce_scatter_runs_into_(const at::Tensor& out, const std::vector<at::Tensor>& ins, const Runs& runs, ReduceOp op,
                               const Group& group);

// Runs as an op has them: for each rank how many there are, and then of each run its tensor, begin and size.
//   {{{0, 0, 8}}, {{0, 8, 6}, {kPadding, 0, 2}}}   ->   1  0 0 8   2  0 8 6  -1 0 2
std::vector<int64_t> numbers_of(const Runs& runs);
Runs runs_from(at::IntArrayRef numbers);  // UsageError where they do not add up

}  // namespace tessera::comm
