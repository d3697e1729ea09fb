#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/holder.h"
#include "tessera/tensor_parallel/plan.h"

#include <optional>

namespace tessera {

struct ParallelizeOptions {
  Unmatched unmatched = Unmatched::Throw;
  // Whose values count, along the mesh; none: each rank cuts what it has, and nothing is sent.
  std::optional<int64_t> src_data_rank = 0;
};

// Lays the modules that the plan names out over a mesh of one axis, in place: parameters become distributed tensors,
// and hooks move inputs and outputs to where each style says. Everything is checked first (module_work.h): if it
// throws, nothing has changed.
//
// Example:  parallelize_module(model, mesh["tp"], {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}});
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, const Plan& plan,
                        const ParallelizeOptions& options = {});
// No plan: warns and does nothing, as PyTorch does.
void parallelize_module(torch::nn::Module& module, const DeviceMesh& mesh, std::nullopt_t,
                        const ParallelizeOptions& options = {});
// Over the mesh of the innermost MeshScope.
void parallelize_module(torch::nn::Module& module, const Plan& plan, const ParallelizeOptions& options = {});

// A holder gives itself back.
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> H& parallelize_module(
    H& holder, const DeviceMesh& mesh, const Plan& plan, const ParallelizeOptions& options = {}) {
  parallelize_module(static_cast<torch::nn::Module&>(*holder), mesh, plan, options);
  return holder;
}

}  // namespace tessera
