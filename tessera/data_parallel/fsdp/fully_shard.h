#pragma once
#include "tessera/mesh/device_mesh.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <optional>
#include <type_traits>

namespace tessera {

struct MixedPrecisionPolicy {
  std::optional<c10::ScalarType> param_dtype = {};   // forward and backward compute in it
  std::optional<c10::ScalarType> reduce_dtype = {};  // gradients are reduced in it; none: param_dtype
};

struct FullyShardOptions {
  // One axis: parameters are cut over it. Two: cut over the last, copied over the first (HSDP). None: all ranks.
  DeviceMesh mesh = {};
  bool reshard_after_forward = true;  // false: whole until backward is through, faster and larger
  // The dim a parameter is cut along; none: 0.
  std::function<std::optional<int64_t>(const at::Tensor& parameter)> shard_placement_fn = {};
  MixedPrecisionPolicy mp_policy = {};
};

// Cuts the parameters of the module that no inner call has taken, in place: each becomes a distributed tensor, of which
// this rank keeps a piece. They are gathered, together, when the module runs, and gradients are reduced into pieces.
// Call it for the inner modules first, then for the outermost:
//
//   for (auto& block : model->blocks) fully_shard(block, {.mesh = mesh["dp"]});
//   fully_shard(model, {.mesh = mesh["dp"]});
void fully_shard(torch::nn::Module& module, const FullyShardOptions& options = {});
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& fully_shard(
    H& holder, const FullyShardOptions& options = {}) {
  fully_shard(static_cast<torch::nn::Module&>(*holder), options);
  return holder;
}

}  // namespace tessera
