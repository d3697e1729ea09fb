#pragma once
#include "tessera/data_parallel/fsdp/fsdp_module.h"
#include "tessera/mesh/device_mesh.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

namespace tessera {

struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype = {};   // forward and backward compute in it
  std::optional<c10::ScalarType> reduce_dtype = {};  // gradients are reduced in it; none: param_dtype
  std::optional<c10::ScalarType> output_dtype = {};  // floating-point results of forward are cast to it
  bool cast_forward_inputs = true;                   // floating-point arguments of forward, to param_dtype
};

struct OffloadPolicy {
  bool offload = false;
  bool pin_memory = true;  // of the shards, where parameters are computed with on a device
};
// Shards, their gradients, and so the optimizer's state, live on the CPU, and never in the memory that is computed
// with.
inline OffloadPolicy CPUOffloadPolicy(bool pin_memory = true) { return {true, pin_memory}; }  // NOLINT: PyTorch's name

struct FullyShardOptions {
  // One axis: parameters are cut over it. Two: cut over the last, copied over the first (HSDP). None: all ranks.
  DeviceMesh mesh = {};
  ReshardAfterForward reshard_after_forward = {};
  // The dim a parameter is cut along; none: 0.
  std::function<std::optional<int64_t>(const at::Tensor& parameter)> shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
  OffloadPolicy offload_policy = {};
  std::vector<at::Tensor> ignored_params = {};  // stay as they are; their gradients are not reduced
};

// Cuts the parameters of the module that no inner call has taken, in place: each becomes a distributed tensor, of which
// this rank keeps a piece. They are gathered, together, when the module runs, and gradients are reduced into pieces.
// Call it for the inner modules first, then for the outermost:
//
//   for (auto& block : model->blocks) fully_shard(block, {.mesh = mesh["dp"]});
//   fully_shard(model, {.mesh = mesh["dp"]});
//
// Parameters that are distributed over other axes of the mesh (parallelize_module) are cut once more.
FSDPModule fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& fully_shard(
    H& holder, const FullyShardOptions& options = {}) {
  fully_shard(static_cast<torch::nn::Module&>(*holder), options);
  return holder;
}

// Several modules as one unit: gathered when the first of them runs, let go of after the last.
// Example:  fully_shard({model->norm.ptr(), model->head.ptr()}, {.mesh = mesh["dp"]});
FSDPModule fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                       const FullyShardOptions& options = {});
inline FSDPModule fully_shard(std::initializer_list<std::shared_ptr<torch::nn::Module>> modules,
                              const FullyShardOptions& options = {}) {
  return fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>(modules), options);
}

}  // namespace tessera
