#pragma once
#include "tessera/pipelining/detail/action_table.h"
#include "tessera/pipelining/schedule.h"

// Performs the actions of one rank in one step.
namespace tessera::pipelining {

struct StepOptions {
  const std::string& schedule;
  const std::vector<int64_t>& stage_ranks;
  int64_t n_microbatches;
  const LossFn& loss_fn;  // empty: forward only
  bool scale_grads;
  // By stage: gets the sums over the microbatches of this rank. Null: nothing is measured.
  std::vector<StageCost>* costs;
};

// One entry per microbatch on the rank of the last stage, empty elsewhere.
struct StepResult {
  std::vector<at::Tensor> losses;
  std::vector<at::Tensor> outputs;  // forward only
};

StepResult run_step(const RankActions& actions, const std::vector<PipelineStage>& stages, const comm::Group& group,
                    const StepOptions& options, const at::Tensor& input, const at::Tensor& target);

// What a rank waits for when it waits for a message, over all ranks on which that message depends:
// "1SEND_F3 of rank 1, which needs 0SEND_F3 of rank 0".
std::string awaited_actions(const std::vector<int64_t>& stage_ranks, int64_t stage, int64_t microbatch, bool forward,
                            const std::vector<int64_t>& global_ranks);

}  // namespace tessera::pipelining
