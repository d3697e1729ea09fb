#pragma once
#include "tessera/train/config.h"
#include "tessera/train/detail/metrics.h"

#include <iosfwd>
#include <map>
#include <optional>
#include <string>
#include <vector>

// Predicts memory and communication of a training run from its config, for any number of ranks, in one process.
namespace tessera::train {

// A parameter and its local shard on rank 0, or on the first rank of the pipeline that has it.
struct PlannedParameter {
  std::string name;                  // as in named_parameters()
  std::vector<int64_t> sizes;        // global
  std::vector<int64_t> local_sizes;  // on that rank
  std::string placements;            // "fsdp S(0), tp S(1)"; "" for a plain tensor, replicated on every rank
  int64_t local_bytes = 0;           // on that rank
  // Memberwise.
  bool operator==(const PlannedParameter&) const = default;
};

// Collectives of one kind over one mesh axis in one step.
struct PlannedTraffic {
  std::string axis;       // "dp"
  std::string what;       // "all_reduce of gradients"
  Traffic traffic;        // number and bytes
  bool estimate = false;  // false: exact
  // Memberwise.
  bool operator==(const PlannedTraffic&) const = default;
};

// Memory of one kind on the rank TrainPlan::memory_rank.
struct PlannedMemory {
  std::string kind;       // "parameters", "gradients", ...
  int64_t bytes = 0;      // on that rank
  bool estimate = false;  // false: exact
  // Memberwise.
  bool operator==(const PlannedMemory&) const = default;
};

// The stages of one rank of the axis pp.
struct PlannedStages {
  std::vector<int64_t> stages;  // ascending
  int64_t blocks = 0;           // of all its stages
  int64_t memory_bytes = 0;     // of a rank with these stages, an estimate
  double busy = 0;              // share of the step in which it computes
  // Memberwise.
  bool operator==(const PlannedStages&) const = default;
};

// The pipeline schedule, simulated with the floating-point operations of each stage as its time.
struct PlannedPipeline {
  std::string schedule;              // as PyTorch writes it
  int64_t stages = 1;                // of the model
  int64_t microbatches = 1;          // of a step
  double bubble = 0;                 // share of the time of all ranks in which they wait
  std::vector<PlannedStages> ranks;  // of the axis pp
  // Memberwise.
  bool operator==(const PlannedPipeline&) const = default;
};

// The prediction.
struct TrainPlan {
  TrainConfig config;                        // the input
  MeshShape mesh;                            // from mesh_shape()
  int64_t ranks = 1;                         // the input
  std::vector<PlannedParameter> parameters;  // in the order of named_parameters()
  std::vector<int64_t> parameter_bytes;      // per rank
  std::vector<PlannedTraffic> traffic;       // of rank 0 per step, from the second on (the first rebuilds the buckets)
  std::optional<PlannedPipeline> pipeline;   // with the axis pp
  int64_t memory_rank = 0;                   // the rank that needs the most memory
  std::vector<PlannedMemory> memory;         // of memory_rank
  int64_t device_memory = 0;                 // bytes of the device of a rank; 0: unknown

  // The sum of `memory`.
  int64_t memory_bytes() const;

  // Totals per mesh axis, as StepMetrics::traffic.
  std::map<std::string, Traffic> traffic_by_axis() const;
};

// All reasons why the config cannot run on this number of ranks. Empty: it can run.
std::vector<std::string> config_errors(const TrainConfig& config, int64_t ranks);

// Makes the plan, for a device of this host. Throws UsageError if config_errors() is not empty. Requires: this thread
// has no world.
TrainPlan plan_training(const TrainConfig& config, int64_t ranks);

// Prints tables of parameters, collectives and memory. Equal blocks are one row.
std::ostream& operator<<(std::ostream& out, const TrainPlan& plan);

}  // namespace tessera::train
