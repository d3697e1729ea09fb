#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/comm/collectives.h"
#include "tessera/pipelining/detail/schedules.h"

// Runs a pipeline schedule: this rank's stages on all microbatches of a batch, with real communication.
namespace tessera::pipelining {

// One stage of a model on this rank.
struct StageModule {
  int64_t stage = 0;
  std::function<at::Tensor(const at::Tensor&)> forward = {};
  std::vector<at::Tensor> parameters = {};
  // What UNSHARD, RESHARD and REDUCE_GRAD do for a stage whose parameters are sharded. Empty: nothing.
  std::function<void()> unshard = {};
  std::function<void()> reshard = {};
  std::function<void()> reduce_grad = {};
};

struct PipelineOptions {
  std::string schedule = "1F1B";
  int64_t microbatches = 1;
  // Of the output of the last stage and the target, for one microbatch.
  std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)> loss;
};

// Collective over `group`, whose ranks are the ranks of the schedule.
class PipelineRun {
 public:
  // `stages`: of this rank, in any order. Throws UsageError if they are not the stages that the schedule gives it.
  PipelineRun(std::vector<StageModule> stages, PipelineOptions options, const GroupRef& group = {});

  // One step. Splits `input` (used by the rank of the first stage) and `target` (by the rank of the last) along dim 0
  // into microbatches, and accumulates the gradients of the mean loss into the parameters. Returns the losses of the
  // microbatches on the rank of the last stage, an empty list elsewhere. If an action fails, the error names the stage,
  // the microbatch and the action.
  std::vector<at::Tensor> step(const at::Tensor& input, const at::Tensor& target);

  const ActionTable& actions() const { return table_; }  // of all ranks, with communication

 private:
  std::vector<StageModule> stages_;
  PipelineOptions options_;
  comm::Group group_;
  std::vector<int64_t> stage_ranks_;
  ActionTable table_;
};

}  // namespace tessera::pipelining
