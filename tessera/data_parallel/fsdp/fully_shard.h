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

// Dtypes of parameters, gradients and activations under fully_shard (PyTorch: MixedPrecisionPolicy).
struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype = {};   // of the unsharded parameters in forward and backward
  std::optional<c10::ScalarType> reduce_dtype = {};  // of the gradient reduction; none: param_dtype
  std::optional<c10::ScalarType> output_dtype = {};  // floating-point outputs of forward are cast to it
  bool cast_forward_inputs = true;                   // floating-point inputs of forward are cast to param_dtype
};

// Where sharded parameters, gradients and optimizer state are kept.
struct OffloadPolicy {
  bool offload = false;    // on the CPU; the compute device has only the unsharded parameters
  bool pin_memory = true;  // pins the CPU memory if the compute device is a GPU
};
// An OffloadPolicy that keeps shards, their gradients and so the optimizer state on the CPU.
inline OffloadPolicy CPUOffloadPolicy(bool pin_memory = true) { return {true, pin_memory}; }  // NOLINT: PyTorch's name

// Options of fully_shard.
struct FullyShardOptions {
  // One axis: parameters are sharded over it. Two axes: replicated over the first, sharded over the last (HSDP).
  // None: all ranks, on the device of the parameters.
  DeviceMesh mesh = {};
  // Whether parameters are resharded after forward.
  ReshardAfterForward reshard_after_forward = {};
  // Returns the dim along which a parameter is sharded; none: 0.
  std::function<std::optional<int64_t>(const at::Tensor& parameter)> shard_placement_fn = {};
  // Dtypes.
  MixedPrecisionPolicy mp_policy = {};
  // CPU offload.
  OffloadPolicy offload_policy = {};
  // Parameters that are not sharded and whose gradients are not reduced.
  std::vector<at::Tensor> ignored_params = {};
};

// Shards the parameters of the module in place, except those that an inner call has sharded. Each becomes a DTensor of
// which this rank keeps a shard. They are all-gathered together when the module runs, and gradients are
// reduce-scattered. Call it for inner modules first, then for the root:
//
//   for (auto& block : model->blocks) fully_shard(block, {.mesh = mesh["dp"]});
//   fully_shard(model, {.mesh = mesh["dp"]});
//   fsdp_module(model).set_requires_gradient_sync(false);
//
// A parameter that is a DTensor over other axes of the mesh (parallelize_module) is sharded once more. A module without
// hooks (from torch::nn or TORCH_MODULE) is sharded too, but without prefetch. Returns its argument.
torch::nn::Module& fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& fully_shard(
    H& holder, const FullyShardOptions& options = {}) {
  fully_shard(static_cast<torch::nn::Module&>(*holder), options);
  return holder;
}

// Several modules whose parameters are one group: all-gathered when the first module runs, resharded after the last.
// Returns the modules.
// Example:  fully_shard({model->norm.ptr(), model->head.ptr()}, {.mesh = mesh["dp"]});
std::vector<std::shared_ptr<torch::nn::Module>> fully_shard(
    const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options = {});
inline std::vector<std::shared_ptr<torch::nn::Module>> fully_shard(
    std::initializer_list<std::shared_ptr<torch::nn::Module>> modules, const FullyShardOptions& options = {}) {
  return fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>(modules), options);
}

}  // namespace tessera
