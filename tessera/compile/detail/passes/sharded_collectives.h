#pragma once
#include "tessera/compile/detail/ir/dependencies.h"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

// What the passes on all-gathers and reduce-scatters share. Each collective exists in two forms: on a single tensor,
// and between one flat tensor and segments of several full tensors (comm/detail/runs_ops.h). The passes decide only by
// order, dtypes and bytes of unsharded tensors. These are equal on all ranks, so the resulting order of collectives is
// too.
namespace tessera::compiler {

constexpr int64_t kShardedBucketBytes = int64_t{25} << 20;  // of unsharded tensors

enum class ShardedKind : uint8_t { AllGather, ReduceScatter };
struct ShardedCollective {
  size_t node;
  ShardedKind kind;
  bool of_segments;
  int32_t group;
  c10::ScalarType dtype;
  int64_t bytes;  // of the unsharded tensor
};
// None if the node is not an all-gather or reduce-scatter.
std::optional<ShardedCollective> sharded_collective(const Program& program, size_t node);
std::vector<ShardedCollective> sharded_collectives(const Program& program, ShardedKind kind);
// True if both can be members of one bucket: same kind, form, group and dtype.
bool can_share(const ShardedCollective& a, const ShardedCollective& b);
std::vector<size_t> nodes_of(const std::vector<ShardedCollective>& members);

// The views, allocations and casts that a node needs. They can move up with it.
struct InputChain {
  std::vector<int32_t> nodes;  // after node `from`, in program order
  int32_t after = -1;          // the last node outside the chain that the node or the chain depends on
};
// Nodes up to `from` stay where they are.
InputChain input_chain(const Program& program, const Dependencies& dependencies, size_t node, int32_t from);

// The arguments of several collectives of segments as those of one. The flat tensors are concatenated.
struct JoinedSegments {
  ValueList flat = {};     // the flat tensors: inputs of all-gathers, outputs of reduce-scatters
  int64_t numel = 0;       // of all flat tensors
  ValueList tensors = {};  // the full tensors
  c10::IValue segments = {};
  std::string label = {};
};
JoinedSegments join_segments(const Program& program, const std::vector<ShardedCollective>& members);

}  // namespace tessera::compiler
