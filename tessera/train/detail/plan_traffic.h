#pragma once
#include "tessera/placement/detail/tensor_spec.h"
#include "tessera/train/plan.h"

// The collectives of a step, by where they come from.
namespace tessera::train::planning {

struct Parameter {
  std::string name;
  std::vector<int64_t> over_tp;  // sizes of what a rank computes with: its piece over tp, whole over the rest
  SpecRef spec;                  // how it is kept; null: plain
};
using Parameters = std::vector<Parameter>;

// "h.3.attn.c_attn.weight" is in block 3, "wte.weight" in none: -1.
int64_t block_of(const std::string& name);
int64_t blocks_in(const models::Config& config);
models::Config with_blocks(models::Config config, int64_t blocks);

// What layers post over tp as they compute. Found by running one block and two on a few tokens, as rank 0 of a fake
// world, from which more blocks and more tokens follow: every collective is of so many bytes a token, or of a constant.
std::vector<PlannedTraffic> layers_over_tp(const TrainConfig& config, const MeshShape& mesh);
// Gradients of copies, in the reducer's buckets.
std::vector<PlannedTraffic> gradients_over_dp(const TrainConfig& config, const Parameters& parameters);
// Units that are gathered, and whose gradients are reduced.
std::vector<PlannedTraffic> units_over_fsdp(const TrainConfig& config, const MeshShape& mesh,
                                            const Parameters& parameters);
// One number for each kind of piece, for the norm of all gradients and for what fp16 must agree on. Requires: the
// meshes' world is the current one, and a fake one.
std::vector<PlannedTraffic> numbers_of_gradients(const TrainConfig& config, const Parameters& parameters);

// What a rank holds when units are gathered: of all of fsdp the most that is there at one time.
int64_t gathered_bytes(const TrainConfig& config, const MeshShape& mesh, const Parameters& parameters);

}  // namespace tessera::train::planning
