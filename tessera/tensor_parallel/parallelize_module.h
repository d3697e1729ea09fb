#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/holder.h"
#include "tessera/tensor_parallel/plan.h"

#include <optional>
#include <type_traits>

namespace tessera {

// Options of parallelize_module.
struct ParallelizeOptions {
  Unmatched unmatched = Unmatched::Throw;  // what to do if a pattern of the plan matches no module
  // The rank along the mesh that scatters or broadcasts its parameters, as in PyTorch. nullopt: each rank slices its
  // own parameters, without communication.
  std::optional<int64_t> src_data_rank = 0;
};

// Applies a tensor-parallel plan to a module, in place, over a 1-D mesh. Parameters become distributed tensors, and
// hooks redistribute inputs and outputs as the styles specify. Checks the entire plan first: if it throws, nothing has
// changed.
// Returns the module. An empty plan, or nullopt, has no effect except a warning, as in PyTorch.
//
// Example:  parallelize_module(model, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
torch::nn::Module& parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan,
                                      const ParallelizeOptions& options = {});
torch::nn::Module& parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, std::nullopt_t,
                                      const ParallelizeOptions& options = {});
// The same over the mesh of the innermost MeshScope.
torch::nn::Module& parallelize_module(torch::nn::Module& module, const Plan& plan,
                                      const ParallelizeOptions& options = {});

// The same for a holder. Returns the holder.
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& parallelize_module(
    H& holder, const DeviceMesh& mesh, const Plan& plan, const ParallelizeOptions& options = {}) {
  parallelize_module(static_cast<torch::nn::Module&>(*holder.ptr()), mesh, plan, options);
  return holder;
}
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& parallelize_module(
    H& holder, const DeviceMesh& mesh, std::nullopt_t, const ParallelizeOptions& options = {}) {
  parallelize_module(static_cast<torch::nn::Module&>(*holder.ptr()), mesh, std::nullopt, options);
  return holder;
}
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& parallelize_module(
    H& holder, const Plan& plan, const ParallelizeOptions& options = {}) {
  parallelize_module(static_cast<torch::nn::Module&>(*holder.ptr()), plan, options);
  return holder;
}

}  // namespace tessera
