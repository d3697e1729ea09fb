#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/pipelining/detail/action_table.h"

// The pipeline schedules, by PyTorch's names, as tables of compute actions.
namespace tessera::pipelining {

struct PipelineShape {
  int64_t ranks = 1;
  int64_t stages_per_rank = 1;
  int64_t microbatches = 1;

  int64_t stages() const { return ranks * stages_per_rank; }
  bool operator==(const PipelineShape&) const = default;
};

// GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV.
std::vector<std::string> schedule_names();

// The name as PyTorch writes it. Throws UsageError if it is unknown.
std::string canonical_name(std::string_view name);

// Throws UsageError if the name is unknown, or if the schedule does not exist for this shape.
void check_schedule(std::string_view name, const PipelineShape& shape);

// The compute actions of every rank. Case of `name` does not matter. Throws UsageError as
// check_schedule().
ActionTable compute_schedule(std::string_view name, const PipelineShape& shape);

// The rank of each stage: stage modulo ranks, and a V (0 1 2 2 1 0) for ZBVZeroBubble and DualPipeV.
std::vector<int64_t> stage_ranks(std::string_view name, const PipelineShape& shape);

}  // namespace tessera::pipelining
