#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace c10d {
class Work;
struct ReduceScatterOptions;
}  // namespace c10d

// Where the large side of an all_gather or a reduce_scatter lies, when it is not one tensor with the ranks' parts one
// after the other. A rank's part is then made of runs:
//
//   tensors  0: weight of 4 rows  1: bias of 4      two ranks, and a shard has half of each
//   runs     {{{0, 0, 2 rows}, {1, 0, 2}},          the first rank's part
//             {{0, 2 rows, 2 rows}, {1, 2, 2}}}     the second's
namespace tessera::comm {

struct Run {
  int32_t tensor = 0;           // which of the tensors; kPadding: none
  int64_t begin = 0, size = 0;  // elements of it, as they lie in memory
  bool operator==(const Run&) const = default;
};
constexpr int32_t kPadding = -1;  // is not written to; counts as zeros where it is read

using Runs = std::vector<std::vector<Run>>;  // by rank; each rank's add up to as many elements as the others'

// One collective each, of the kind that their names begin with. The tensors of runs must be contiguous.
Work all_gather_into_runs(const Group& group, const std::vector<at::Tensor>& outs, const Runs& runs,
                          const at::Tensor& in, PostOptions options = {});
// Not for avg, which would be a pass over all of them: divide what comes out.
Work reduce_scatter_runs(const Group& group, const at::Tensor& out, const std::vector<at::Tensor>& ins,
                         const Runs& runs, ReduceOp op, PostOptions options = {});

// What a c10d::Backend of ours can do beyond its interface: take runs as they lie, in a group of several.
// For others they are copied.
struct MovesRuns {
  virtual ~MovesRuns() = default;
  virtual c10::intrusive_ptr<c10d::Work> allgather_runs(const std::vector<at::Tensor>& outs, const Runs& runs,
                                                        const at::Tensor& in) = 0;
  virtual c10::intrusive_ptr<c10d::Work> reduce_scatter_runs(const at::Tensor& out, const std::vector<at::Tensor>& ins,
                                                             const Runs& runs,
                                                             const c10d::ReduceScatterOptions& options) = 0;
};

}  // namespace tessera::comm
