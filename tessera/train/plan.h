#pragma once
#include "tessera/data_parallel/distributed_data_parallel.h"
#include "tessera/nn/deferred_init.h"
#include "tessera/tensor_parallel/plan.h"
#include "tessera/train/config.h"
#include "tessera/train/detail/metrics.h"

#include <concepts>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// Predicts memory and communication for any number of ranks, in one process: plan_training() of a training run from its
// config, tessera::plan() of a module of yours. tessera::report() measures a step of yours on real ranks.
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

namespace tessera {

// Axes of a mesh and their sizes, outermost first: {{"dp", 2}, {"fsdp", 4}, {"tp", 2}}.
using PlannedMesh = std::vector<std::pair<std::string, int64_t>>;

// One training step of a module on a mesh, as rank 0 sees it. plan() makes it.
struct StepPlan {
  PlannedMesh mesh;                                 // the input
  std::vector<train::PlannedParameter> parameters;  // in the order of named_parameters()
  std::vector<train::PlannedTraffic> traffic;       // of one step, from the second step on
  std::vector<train::PlannedMemory> memory;         // of rank 0, which has the largest local shards
  // Totals per mesh axis.
  std::map<std::string, train::Traffic> traffic_by_axis() const;
};
// Prints tables of parameters, collectives and memory.
std::ostream& operator<<(std::ostream& out, const StepPlan& plan);

namespace train::planning {

// Internal: runs a step in a world without peers, and records it. For plan().
class StepRecorder {
 public:
  explicit StepRecorder(PlannedMesh axes);
  ~StepRecorder();
  StepRecorder(const StepRecorder&) = delete;
  // Shards the module over the axes tp and fsdp.
  void parallelize(torch::nn::Module& module, const Plan& tensor_parallel);
  // The axis over which gradients are averaged by DistributedDataParallel, if there is one.
  std::optional<DeviceMesh> replicas() const;
  // Runs two steps and records the second one.
  StepPlan run(torch::nn::Module& module, const std::function<Tensors()>& forward);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace train::planning

// Predicts a training step of a module of yours: parameters and their placements, collectives and memory. It runs two
// steps as rank 0 of a world without peers, and needs memory for the local shards of that rank only.
//   make       returns a new module holder; runs in deferred_init
//   axes       "dp": DistributedDataParallel, or replicas of fsdp; "fsdp": fully_shard; "tp": parallelize_module with
//              `tensor_parallel`. Other names are an error
//   inputs     of forward, on one rank. The loss is the sum of the means of all outputs
// Requires: this thread has no world. Throws UsageError as the functions that it calls.
// Example:  std::cout << ts::plan([] { return Net(64); }, {{"fsdp", 8}, {"tp", 2}},
//                                 {{"up", ts::ColwiseParallel()}, {"down", ts::RowwiseParallel()}}, x);
template <std::invocable Make, class... Inputs>
StepPlan plan(Make make, const PlannedMesh& axes, const Plan& tensor_parallel, const Inputs&... inputs) {
  train::planning::StepRecorder recorder(axes);
  auto model = deferred_init(make);
  recorder.parallelize(*model, tensor_parallel);
  materialize(*model);
  if (const auto replicas = recorder.replicas()) {
    DistributedDataParallel ddp(model, {.device_mesh = *replicas});
    return recorder.run(*model, [&] { return tensors_of(ddp(inputs...)); });
  }
  return recorder.run(*model, [&] { return tensors_of(model(inputs...)); });
}

// What a step of yours took, on this rank. report() makes it.
struct StepReport {
  int64_t steps = 0;                                   // measured
  double median_seconds = 0, slowest_seconds = 0;      // of a step
  std::map<std::string, train::Traffic> traffic = {};  // of one step, by mesh axis
  double memory_gib = 0;                               // peak of this rank so far
};
// Prints a table.
std::ostream& operator<<(std::ostream& out, const StepReport& report);

// Runs `step` steps + 1 times and measures it; the first call, which may compile, does not count. All ranks call it if
// the step communicates. Put what the step needs into it: batches, optimizer, scheduler.
// Example:  auto measured = ts::report([&] { train_step(model, optimizer, next_batch()); });
//           if (ts::get_rank() == 0) std::cout << measured;
StepReport report(const std::function<void()>& step, int64_t steps = 10, at::Device device = at::kCPU);

}  // namespace tessera
