#pragma once
#include "tessera/compile/detail/ir/dependencies.h"

#include <cstdint>
#include <optional>
#include <vector>

// What the passes on all-gathers and reduce-scatters share. Each collective is there in two forms: of a tensor by
// itself, and between one tensor and runs of many (comm/runs_ops.h). What they decide by, order, dtypes and bytes of
// whole tensors, is the same on all ranks; so is, then, the order of collectives that they leave.
namespace tessera::compiler {

constexpr int64_t kShardedBucketBytes = int64_t{25} << 20;  // of what is gathered or reduced, when whole

enum class ShardedKind : uint8_t { AllGather, ReduceScatter };
struct ShardedCollective {
  size_t node;
  ShardedKind kind;
  bool of_runs;
  int32_t group;
  c10::ScalarType dtype;
  int64_t bytes;  // when whole
};
// None: the node is another one.
std::optional<ShardedCollective> sharded_collective(const Program& program, size_t node);
std::vector<ShardedCollective> sharded_collectives(const Program& program, ShardedKind kind);
bool can_share(const ShardedCollective& a, const ShardedCollective& b);  // one collective, but for its place

// Collectives of tensors by themselves as one coalesced op has them.
struct CoalescedArguments {
  ValueList xs = {}, results = {};
  std::vector<int64_t> dims = {}, sizes = {};
};
CoalescedArguments coalesced_arguments(const Program& program, const std::vector<ShardedCollective>& members);

// What a node needs that was made on its way to it: views, memory, casts. Nodes up to `from` are there.
struct Feeding {
  std::vector<int32_t> nodes;  // after `from`, in order
  int32_t after = -1;          // the last other node that it, or one of those, comes after
};
Feeding feeding_of(const Program& program, const Dependencies& dependencies, size_t node, int32_t from);

// Runs of several collectives as those of one: each has its `tensors`, one after the other.
c10::IValue joined_runs(const std::vector<std::vector<int64_t>>& runs, const std::vector<size_t>& tensors);
std::string joined_labels(const std::vector<std::string>& labels);

}  // namespace tessera::compiler
