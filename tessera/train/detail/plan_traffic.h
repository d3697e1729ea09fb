#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/train/plan.h"

// Predicts the collectives of a step, by their source.
namespace tessera::train::planning {

struct PlanParameter {
  std::string name;
  std::vector<int64_t> compute_sizes;  // sizes in forward: sharded over tp only
  SpecRef spec;                        // spec of the parameter; null: a plain tensor
};
using PlanParameters = std::vector<PlanParameter>;

// Index of the transformer block: 3 for "h.3.attn.c_attn.weight", -1 for "wte.weight".
int64_t block_of(const std::string& name);
int64_t blocks_in(const models::Config& config);
models::Config with_blocks(models::Config config, int64_t blocks);

// Collectives of the layers over tp. Runs the model with one and with two blocks on few tokens, as rank 0 of a fake
// world, and extrapolates: the bytes of a collective are linear in the tokens, and the collectives in the blocks.
std::vector<PlannedTraffic> tensor_parallel_traffic(const TrainConfig& config, const MeshShape& mesh);
// All-reduce of gradients over dp, in the reducer's buckets.
std::vector<PlannedTraffic> bucket_traffic(const TrainConfig& config, const PlanParameters& parameters);
// All-gather of parameters and reduce-scatter of gradients over fsdp.
std::vector<PlannedTraffic> fsdp_traffic(const TrainConfig& config, const MeshShape& mesh,
                                         const PlanParameters& parameters);
// Collectives of clip_grad_norm_() and, with fp16, of GradScaler's check for infinities.
// Requires: the specs are of the current world, which is a fake one.
std::vector<PlannedTraffic> grad_norm_traffic(const TrainConfig& config, const PlanParameters& parameters);

// Peak bytes of unsharded FSDP parameters on one rank.
int64_t unsharded_bytes(const TrainConfig& config, const MeshShape& mesh, const PlanParameters& parameters);

}  // namespace tessera::train::planning
