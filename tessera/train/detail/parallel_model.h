#pragma once
#include "tessera/data_parallel/fsdp/fsdp_module.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/data_parallel/virtual_shards.h"
#include "tessera/pipelining/schedule.h"
#include "tessera/tensor_parallel/context_parallel.h"
#include "tessera/train/config.h"
#include "tessera/train/detail/language_model.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace tessera::train {

// A parameter of this rank, under its name in the model.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

ContextParallelOptions context_options(const ParallelOptions& options);

// A language model parallelized over a mesh: experts over ep, by a plan over tp, stages over pp, with fully_shard() per
// block over fsdp, with replicate() over dp. Order of construction:
//
//   deferred_init -> expert_parallel(ep) -> parallelize_module(tp) -> checkpoint_wrapper per block -> build_stages(pp)
//   -> fully_shard(fsdp) -> materialize -> replicate(dp)
//
// Each rank initializes only its local shards of its own stages. The values depend on the seed and not on the mesh.
// With pp, cp or ep, gradients are averaged over dp, cp and the replicas of experts after backward: one coalesced
// all-reduce per axis.
class ParallelModel {
 public:
  enum class Init : uint8_t { Materialize, Deferred };  // Deferred: only shapes and placements; it cannot run
  ParallelModel(const TrainConfig& config, DeviceMesh mesh, Init init = Init::Materialize);
  ParallelModel(const ParallelModel&) = delete;  // stages refer to it

  LanguageModel& language_model() { return language_model_; }
  torch::nn::Module& module() const { return module_of(language_model_); }
  const DeviceMesh& mesh() const { return mesh_; }
  // Axes edp (replicas of an expert) and ep, of all ranks; empty without ep.
  const DeviceMesh& expert_mesh() const { return expert_mesh_; }

  bool has_axis(const std::string& name) const;
  int64_t data_ranks() const;    // number of ranks with different rows (dp x fsdp)
  int64_t data_rank() const;     // index of this rank among them
  int64_t loss_ranks() const;    // number of ranks with different tokens (dp x fsdp x cp)
  DeviceMesh data_mesh() const;  // the axes dp and fsdp; without state if the mesh has neither
  // Sums over the ranks with different tokens, in place. No communication if there is one.
  void sum_over_data(at::Tensor& values) const;
  // The values of all ranks with different tokens. One collective per axis, as sum_over_data().
  at::Tensor gather_over_data(const at::Tensor& value) const;
  // Sums over pp, in place. Values that only one stage has are 0 on the others.
  void sum_over_stages(at::Tensor& values) const;

  // The parameters of this rank: all, or those of its pipeline stages.
  std::vector<NamedParameter> parameters() const;
  // Whether the rank has this parameter or buffer.
  bool has_parameter(const std::string& name) const { return !has_stages() || names_.contains(name); }
  // Those whose gradients this rank counts in a norm over all stages: of copies, one is counted.
  std::vector<at::Tensor> counted_parameters() const;
  int64_t parameter_bytes() const;  // of this rank's local shards

  bool has_stages() const { return !stages_.empty(); }
  const std::vector<pipelining::PipelineStage>& stages() const { return stages_; }  // of this rank; empty without pp
  // The layers of stages().
  const std::vector<pipelining::PipelineLayers>& stage_layers() const { return stage_layers_; }
  int64_t microbatches() const { return microbatches_; }  // of the stages
  // With stages and invariant numerics: add the gradients of the microbatches, each of which is a virtual shard. In the
  // order of stages().
  const std::vector<std::shared_ptr<VirtualShards>>& stage_shards() const { return stage_shards_; }

  // In this scope, attention is context-parallel. Null without cp.
  std::unique_ptr<ContextParallel> context_scope() const;
  // The logits of tokens, which are those of this rank if there is a context scope. With stages: undefined on ranks
  // without the last one.
  at::Tensor logits(const at::Tensor& tokens);
  // Forward and backward of a batch through the stages. `loss` is called per microbatch, on ranks with the last stage.
  // Requires: has_stages().
  void step_stages(const at::Tensor& input, const at::Tensor& target, const pipelining::LossFn& loss);

  // false: the next backward accumulates gradients locally, without communication.
  void set_gradient_sync(bool sync);
  // After backward, without stages: averages gradients over the axes that neither FSDP nor replicate() reduce.
  void reduce_gradients() const;

  // Experts of each layer that this rank has, by the index of the layer. Empty without experts.
  std::vector<std::pair<int64_t, models::MoE>> experts() const;

 private:
  void build_stages_of(const TrainConfig& config);
  void shard_over_fsdp(const TrainConfig& config);
  void reduce_gradients_of(const std::vector<at::Tensor>& parameters) const;
  std::vector<at::Tensor> expert_parameters() const;  // with ep

  DeviceMesh mesh_, expert_mesh_;
  LanguageModel language_model_;
  std::optional<FSDPModule> fsdp_module_;
  std::optional<Replicated> replicated_;
  std::vector<std::string> reduced_axes_;  // by reduce_gradients()
  std::vector<pipelining::PipelineStage> stages_;
  std::vector<pipelining::PipelineLayers> stage_layers_;  // of stages_
  std::vector<std::shared_ptr<VirtualShards>> stage_shards_;
  std::set<std::string> names_;  // of the parameters and buffers of stages_
  std::shared_ptr<pipelining::LossFn> loss_ = std::make_shared<pipelining::LossFn>();
  std::shared_ptr<pipelining::PipelineSchedule> schedule_;
  ContextParallelOptions context_options_;
  int64_t microbatches_ = 1;
};

}  // namespace tessera::train
