#pragma once
#include "tessera/comm/collectives.h"
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/modules.h"
#include "tessera/pipelining/detail/schedules.h"
#include "tessera/pipelining/detail/simulate.h"
#include "tessera/pipelining/detail/stage_module.h"
#include "tessera/state/state_dict.h"

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

// Pipeline parallelism (PyTorch: torch.distributed.pipelining). A model is a chain of layers. A stage is a part of the
// chain. Each rank of the pipeline group has one or more stages. A schedule runs them on the microbatches of a batch.
//
//   nn::Sequential model = ...;                                  // the same on every rank
//   auto split = pipelining::split_evenly(pipelining::layers_of(model), 4);
//   auto stages = pipelining::build_stages(*model, split, "1F1B", mesh["pp"]);
//   pipelining::Schedule1F1B schedule(stages, /*n_microbatches=*/8, loss_fn, mesh["pp"]);
//   auto losses = schedule.step(input, target);                  // accumulates gradients; then step the optimizer
namespace tessera {
struct CompileOptions;  // tessera/compile/api/options.h
}
namespace tessera::pipelining {

// From the output of the last stage and the target of one microbatch to a loss.
using LossFn = std::function<at::Tensor(const at::Tensor& output, const at::Tensor& target)>;

// One layer of a model that is a chain of layers.
struct PipelineLayer {
  std::string name;                                              // "h.3"; unique in the chain
  StageForward forward;                                          // from the output of the layer before
  std::vector<std::shared_ptr<torch::nn::Module>> modules = {};  // whose parameters and buffers `forward` uses
};
// A chain of layers: a model, or a stage of one.
using PipelineLayers = std::vector<PipelineLayer>;

// The children of a Sequential, each of which takes and returns one tensor. models::pipeline_layers() returns those of
// GPT-2 and Llama.
PipelineLayers layers_of(const nn::Sequential& model);

// Splits a chain into stages. A stage begins at each of the named layers, and one at the first layer (PyTorch:
// SplitPoint.BEGINNING). Throws UsageError for an unknown name, with similar ones.
// Example:  split_at(layers, {"h.4", "h.8"})      // three stages
std::vector<PipelineLayers> split_at(const PipelineLayers& layers, const std::vector<std::string>& begins);
// Splits a chain into this many stages, so that the largest number of parameters in a stage is as small as possible.
std::vector<PipelineLayers> split_evenly(const PipelineLayers& layers, int64_t stages);

// A parameter that several stages use, such as the weight of a tied embedding. Ranks with such a stage have a copy
// each. step() adds the gradients of all copies, so that equal optimizers keep the copies equal.
struct SharedParameter {
  at::Tensor parameter;
  std::vector<int64_t> stages;  // ascending
};

// One stage of a model on this rank (PyTorch: PipelineStage).
class PipelineStage {
 public:
  // A module whose forward takes and returns one tensor.
  template <class H>
  requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> PipelineStage(const H& submodule,
                                                                                    int64_t stage_index,
                                                                                    int64_t num_stages)
      : PipelineStage(StageModule([module = H(submodule)](const at::Tensor& x) mutable { return module(x); },
                                  StageChildren{{"submodule", submodule.ptr()}}),
                      stage_index, num_stages) {}
  // A function and the parameters that it uses.
  PipelineStage(StageForward forward, const std::vector<at::Tensor>& parameters, int64_t stage_index,
                int64_t num_stages)
      : PipelineStage(StageModule(std::move(forward), parameters), stage_index, num_stages) {}
  // A part of a chain of layers.
  PipelineStage(const PipelineLayers& layers, int64_t stage_index, int64_t num_stages);

  int64_t stage_index() const { return stage_index_; }  // 0 is the first stage
  int64_t num_stages() const { return num_stages_; }    // of the model
  // All parameters and buffers of the stage are below this module, so fully_shard(), materialize() and optimizers take
  // it. Its forward runs the stage.
  torch::nn::Module& module() const { return *module_.ptr(); }
  // Runs the stage, with hooks; its program, if compile_stage() was called.
  at::Tensor forward(const at::Tensor& x) const { return compiled_ ? compiled_(x) : module_(x); }
  std::vector<at::Tensor> parameters() const { return module_->parameters(); }  // shared ones included

  // The actions UNSHARD, RESHARD and REDUCE_GRAD of the schedule, for a stage whose parameters are sharded or
  // replicated over a data-parallel axis. Empty: nothing. REDUCE_GRAD comes after the last backward of the stage.
  std::function<void()> unshard = {}, reshard = {}, reduce_grad = {};
  // Called after each microbatch whose gradients of the parameters are computed (B or W), in their order. It may take
  // them out of .grad. Empty: nothing.
  std::function<void()> after_backward = {};
  // The mesh of activations that are DTensors between stages; the stages before and after have the same.
  DeviceMesh mesh = {};
  // Parameters that other stages use too; set by build_stages().
  std::vector<SharedParameter> shared = {};
  // The names in the model of the parameters and buffers of this stage; set by build_stages().
  std::vector<std::string> names = {};

 private:
  friend void compile_stage(PipelineStage&, const CompileOptions&);
  PipelineStage(StageModule module, int64_t stage_index, int64_t num_stages);

  StageModule module_;
  StageForward compiled_;  // empty: the stage runs eagerly
  int64_t stage_index_, num_stages_;
};

// The stages that `schedule` gives to this rank of the group, in ascending order. `split` has all stages of `model`.
// Throws UsageError if a parameter of the model is in no layer, if a layer uses a parameter that the model does not
// have, or if the stages cannot be divided among the ranks. No communication.
// With deferred_init(), build the model on every rank and materialize only the modules of its own stages.
std::vector<PipelineStage> build_stages(const torch::nn::Module& model, const std::vector<PipelineLayers>& split,
                                        std::string_view schedule, const GroupRef& group = {});

// The parameters and buffers of these stages, under their names in the model. dcp::save() and dcp::load() take it, on
// any number of stages. No communication.
StateDict stage_state_dict(const torch::nn::Module& model, const std::vector<PipelineStage>& stages);

// Averages the gradients of a stage over data-parallel ranks, once per step: sets the REDUCE_GRAD action. Call it once
// per axis (dp, cp). The parameters may be DTensors over other axes. The gradient of a parameter that is sharded over
// `group`, such as experts over ep, has the sum over its ranks already; it is divided by their number.
void average_gradients(PipelineStage& stage, const GroupRef& group);
// For a stage whose module() was given to fully_shard(): its gradients are reduced once per step, in REDUCE_GRAD.
// Blocks inside of the stage may be sharded too, before it.
// Example:  fully_shard(stage.module(), {.mesh = mesh["fsdp"]});   use_fully_shard(stage);
void use_fully_shard(PipelineStage& stage);

// Compiles a stage into three programs: F, the forward; I, the gradient of its input; W, the gradients of its
// parameters. The schedule runs each where its table has the action; B runs I and W. Each shape of a microbatch has its
// own programs; eval() runs eagerly. Call it after parallelize_module(), before the schedule is made. Throws UsageError
// for a stage of fully_shard(), which must run eagerly.
//
//   for (PipelineStage& stage : stages) compile_stage(stage);
void compile_stage(PipelineStage& stage);
// The same with options of compile().
void compile_stage(PipelineStage& stage, const CompileOptions& options);

// Options of a schedule.
struct ScheduleOptions {
  bool scale_grads = true;  // gradients are those of the mean of the microbatches' losses; false: of their sum
  // Compute actions in PyTorch's CSV form, one line per rank, instead of those of the named schedule. Line r uses the
  // stages that rank r has. Ranks may have different numbers of stages.
  std::string csv = {};
};

// What PipelineSchedule::profile() has measured, and what follows from it. to_svg(profile.simulation) draws it.
struct ScheduleProfile {
  std::vector<StageCost> stages;  // of all ranks, per microbatch: seconds, and bytes that autograd keeps
  Simulation simulation;          // of a step: seconds, bubble(), and per rank the actions and the peak in bytes
};

// Runs the stages of a pipeline on microbatches, in the order of a schedule (PyTorch: get_schedule_class(name)). The
// names are GPipe, 1F1B, Interleaved1F1B, LoopedBFS, InterleavedZeroBubble, ZBVZeroBubble and DualPipeV.
class PipelineSchedule {
 public:
  // `stages`: those of this rank, in any order. The case of `name` does not matter.
  // Collective over `group`, whose ranks are the ranks of the pipeline. Throws UsageError, on all ranks, if ranks
  // disagree about the schedule; and if the stages are not those that the schedule gives to this rank, or if the
  // schedule does not exist for this number of ranks, stages and microbatches.
  PipelineSchedule(const std::string& name, std::vector<PipelineStage> stages, int64_t n_microbatches,
                   LossFn loss_fn = {}, const GroupRef& group = {}, const ScheduleOptions& options = {});

  // Forward and backward of a batch. `input` is used by the rank of the first stage, `target` by the rank of the last;
  // other ranks may pass undefined tensors. Both are split along dim 0 into microbatches, which differ by at most one
  // row. Accumulates gradients into the parameters. Returns the losses of the microbatches on the rank of the last
  // stage, an empty list elsewhere.
  // If an action fails, the error names its stage, microbatch and type. If a rank is lost, the error names the action
  // that was expected of each rank on which this one depends.
  std::vector<at::Tensor> step(const at::Tensor& input, const at::Tensor& target);
  // Forward only, without gradients. Returns the output of the last stage on its rank, an undefined tensor elsewhere.
  at::Tensor eval(const at::Tensor& input);

  // Runs a step, as step() does, and measures each stage; then simulates the schedule with these costs, or
  // `other_schedule` with the same number of stages per rank. Where the table has B, I and W are given half of it each.
  // Times are those of the host. A stage of compile_stage() counts no bytes. Call step() once before, so that no first
  // call is measured.
  // Example:  if (schedule.profile(x, y, "ZBVZeroBubble").simulation.seconds < ...
  ScheduleProfile profile(const at::Tensor& input, const at::Tensor& target, const std::string& other_schedule = {});

  const std::string& name() const { return name_; }                     // as PyTorch writes it
  const std::vector<PipelineStage>& stages() const { return stages_; }  // of this rank
  // The actions of all ranks, with communication, in PyTorch's CSV form: "0UNSHARD,0F0,0SEND_F0,0F1,..."
  std::string to_csv() const;

 private:
  struct Plan;
  PipelineShape shape() const;

  std::string name_;
  std::vector<PipelineStage> stages_;
  int64_t n_microbatches_;
  LossFn loss_fn_;
  comm::Group group_;
  ScheduleOptions options_;
  std::shared_ptr<const Plan> plan_;  // the actions of all ranks
};

// PyTorch's classes. GPipe and 1F1B have one stage per rank; ZBVZeroBubble and DualPipeV have two per rank, in the
// shape of a V (ranks 0 1 2 2 1 0); the others have any number.
#define TESSERA_PIPELINE_SCHEDULE(Class, Name)                                                                        \
  class Class : public PipelineSchedule {                                                                             \
   public:                                                                                                            \
    Class(std::vector<PipelineStage> stages, int64_t n_microbatches, LossFn loss_fn = {}, const GroupRef& group = {}, \
          const ScheduleOptions& options = {})                                                                        \
        : PipelineSchedule(Name, std::move(stages), n_microbatches, std::move(loss_fn), group, options) {}            \
  }
TESSERA_PIPELINE_SCHEDULE(ScheduleGPipe, "GPipe");                      // all forwards, then all backwards
TESSERA_PIPELINE_SCHEDULE(Schedule1F1B, "1F1B");                        // one forward, one backward in turn
TESSERA_PIPELINE_SCHEDULE(ScheduleInterleaved1F1B, "Interleaved1F1B");  // 1F1B over several stages per rank
TESSERA_PIPELINE_SCHEDULE(ScheduleLoopedBFS, "LoopedBFS");              // GPipe over several stages per rank
TESSERA_PIPELINE_SCHEDULE(ScheduleInterleavedZeroBubble, "InterleavedZeroBubble");  // weight gradients fill the waits
TESSERA_PIPELINE_SCHEDULE(ScheduleZBVZeroBubble, "ZBVZeroBubble");                  // zero bubble, in the shape of a V
TESSERA_PIPELINE_SCHEDULE(ScheduleDualPipeV, "DualPipeV");                          // forwards overlap backwards, V
#undef TESSERA_PIPELINE_SCHEDULE

}  // namespace tessera::pipelining
