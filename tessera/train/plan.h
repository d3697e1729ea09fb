#pragma once
#include "tessera/train/config.h"
#include "tessera/train/detail/metrics.h"

#include <iosfwd>
#include <map>
#include <string>
#include <vector>

// What a training will hold and send, worked out from its config alone: for any number of ranks, on none of them.
namespace tessera::train {

struct PlannedParameter {
  std::string name;
  std::vector<int64_t> sizes, local_sizes;  // whole, and rank 0's piece
  std::string placements;                   // "fsdp S(0), tp S(1)"; "" where every rank has all of it
  int64_t local_bytes = 0;
  bool operator==(const PlannedParameter&) const = default;
};

// Collectives of one kind that a step posts over one axis.
struct PlannedTraffic {
  std::string axis, what;  // "dp", "all_reduce of gradients"
  Traffic traffic;
  bool operator==(const PlannedTraffic&) const = default;
};

struct PlannedMemory {
  std::string kind;
  int64_t bytes = 0;
  bool estimate = false;
  bool operator==(const PlannedMemory&) const = default;
};

struct TrainPlan {
  TrainConfig config;
  MeshShape mesh;
  int64_t ranks = 1;
  std::vector<PlannedParameter> parameters;
  std::vector<int64_t> parameter_bytes;  // of each rank
  std::vector<PlannedTraffic> traffic;   // of a step, once the first has shown in which order gradients come
  std::vector<PlannedMemory> memory;     // of rank 0, which has the largest pieces

  // As StepMetrics has it.
  std::map<std::string, Traffic> traffic_by_axis() const;
};

// Why it could not run on so many ranks; empty if it could. More than one where they do not hang together.
std::vector<std::string> reasons_against(const TrainConfig& config, int64_t ranks);

// Throws UsageError if there is such a reason. Requires: this thread has no world.
TrainPlan plan_training(const TrainConfig& config, int64_t ranks);

// Blocks that are alike as one.
std::ostream& operator<<(std::ostream& out, const TrainPlan& plan);

}  // namespace tessera::train
