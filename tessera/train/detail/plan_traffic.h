#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/train/plan.h"

// Predicts the collectives of a step, by their source.
namespace tessera::train::planning {

struct PlanParameter {
  std::string name;
  std::vector<int64_t> compute_sizes;  // sizes in forward: sharded over tp and ep only
  std::vector<int64_t> local_sizes;    // sizes on this rank
  SpecRef spec;                        // spec of the parameter; null: a plain tensor
  bool is_expert = false;              // sharded over ep
};
using PlanParameters = std::vector<PlanParameter>;

// A pipeline stage of the planned rank, or the model.
struct PlanStage {
  int64_t index = 0;
  bool embedding = true, head = true;
  int64_t blocks = 0;
  std::vector<size_t> parameters;  // indices of the stage's parameters
};
// The stages of the planned rank.
struct PlanStages {
  std::vector<PlanStage> stages;
  int64_t microbatches = 1;          // forwards of each stage per step
  std::vector<int64_t> stage_ranks;  // rank of pp of each stage of the model; empty without pp
  int64_t shared_bytes = 0;          // of parameters that other ranks of pp have too
};

// Index of the transformer block: 3 for "h.3.attn.c_attn.weight", -1 for "wte.weight".
int64_t block_of(const std::string& name);
int64_t blocks_in(const models::Config& config);
models::Config with_blocks(models::Config config, int64_t blocks);

// Tokens of a microbatch on one rank.
int64_t tokens_per_microbatch(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages);

// Collectives of the layers over tp and cp. Runs the stages with one and with two blocks on few tokens, as rank 0 of a
// fake world, and extrapolates: the bytes of a collective are linear in the tokens, and the collectives in the blocks.
std::vector<PlannedTraffic> layer_traffic(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages);
// All-to-all of tokens over ep, for balanced experts: an estimate.
std::vector<PlannedTraffic> expert_traffic(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages);
// Messages between stages and gradients of shared parameters, over pp.
std::vector<PlannedTraffic> stage_traffic(const TrainConfig& config, const MeshShape& mesh, const PlanStages& stages);
// All-reduce of gradients over dp, in the reducer's buckets.
std::vector<PlannedTraffic> bucket_traffic(const TrainConfig& config, const PlanParameters& parameters);
// All-reduce of gradients after backward, of ParallelModel::reduce_gradients(): over cp, over dp if replicate() is not
// used, and over the replicas of experts.
std::vector<PlannedTraffic> reduced_traffic(const TrainConfig& config, const MeshShape& mesh,
                                            const PlanParameters& parameters, const PlanStages& stages);
// All-gather of parameters and reduce-scatter of gradients over fsdp.
std::vector<PlannedTraffic> fsdp_traffic(const TrainConfig& config, const MeshShape& mesh,
                                         const PlanParameters& parameters, const PlanStages& stages);
// Collectives of the gradient norm and, with fp16, of GradScaler's check for infinities.
// Requires: the specs are of the current world, which is a fake one.
std::vector<PlannedTraffic> grad_norm_traffic(const TrainConfig& config, const MeshShape& mesh,
                                              const PlanParameters& parameters);

// Peak bytes of unsharded FSDP parameters on one rank.
int64_t unsharded_bytes(const TrainConfig& config, const MeshShape& mesh, const PlanParameters& parameters,
                        const PlanStages& stages);

}  // namespace tessera::train::planning
