#pragma once
#include "tessera/data_parallel/fsdp/fsdp_module.h"
#include "tessera/data_parallel/replicate.h"
#include "tessera/train/config.h"
#include "tessera/train/detail/network.h"

#include <optional>

namespace tessera::train {

// A network laid out over a mesh: over tp by a plan, over fsdp cut by blocks, over dp copied.
//
//   built without memory -> cut over tp -> blocks checkpointed -> cut over fsdp -> filled -> copies joined over dp
//
// It is filled last, each rank's pieces only, with numbers that depend on the seed and not on the mesh.
class Layout {
 public:
  enum class Values : uint8_t { Filled, None };  // None: to look at what lies where; it cannot be run
  Layout(const TrainConfig& config, DeviceMesh mesh, Values values = Values::Filled);

  Network& network() { return network_; }
  torch::nn::Module& module() const { return module_of(network_); }
  const DeviceMesh& mesh() const { return mesh_; }

  bool has_axis(const std::string& name) const;
  int64_t data_ranks() const;  // that read different samples, and this rank's place among them
  int64_t data_rank() const;
  // Sums `values` over the data-parallel ranks, in place. No communication where there is one.
  void sum_over_data(at::Tensor& values) const;
  void max_over_data(at::Tensor& values) const;

  // False: gradients of the next backward stay on this rank, for a later one that reduces them.
  void set_gradient_sync(bool sync);
  int64_t parameter_bytes() const;  // that this rank holds

 private:
  template <class F>
  void for_each_data_axis(F f) const;

  DeviceMesh mesh_;
  Network network_;
  std::optional<FSDPModule> sharded_;
  std::optional<Replicated> copied_;
};

}  // namespace tessera::train
