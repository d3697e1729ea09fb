#pragma once
#include "tessera/data_parallel/fsdp/fsdp_module.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/train/config.h"
#include "tessera/train/detail/language_model.h"

#include <optional>

namespace tessera::train {

// A language model parallelized over a mesh: by a plan over tp, with fully_shard() per block over fsdp, with
// replicate() over dp. Order of construction:
//
//   deferred_init -> parallelize_module(tp) -> checkpoint_wrapper per block -> fully_shard(fsdp) -> materialize
//   -> replicate(dp)
//
// Each rank initializes only its local shards. The values depend on the seed and not on the mesh.
class ParallelModel {
 public:
  enum class Init : uint8_t { Materialize, Deferred };  // Deferred: only shapes and placements; it cannot run
  ParallelModel(const TrainConfig& config, DeviceMesh mesh, Init init = Init::Materialize);

  LanguageModel& language_model() { return language_model_; }
  torch::nn::Module& module() const { return module_of(language_model_); }
  const DeviceMesh& mesh() const { return mesh_; }

  bool has_axis(const std::string& name) const;
  int64_t data_ranks() const;  // number of data-parallel ranks (dp x fsdp)
  int64_t data_rank() const;   // index of this rank among them
  // Sums over the data-parallel ranks, in place. No communication if there is one.
  void sum_over_data(at::Tensor& values) const;
  // The values of all data-parallel ranks. One collective per data axis, as sum_over_data().
  at::Tensor gather_over_data(const at::Tensor& value) const;

  // false: the next backward accumulates gradients locally, without communication.
  void set_gradient_sync(bool sync);
  int64_t parameter_bytes() const;  // of this rank's local shards

 private:
  template <class F>
  void for_each_data_axis(F f) const;

  DeviceMesh mesh_;
  LanguageModel language_model_;
  std::optional<FSDPModule> fsdp_module_;
  std::optional<Replicated> replicated_;
};

}  // namespace tessera::train
