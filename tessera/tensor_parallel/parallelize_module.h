#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/holder.h"
#include "tessera/tensor_parallel/plan.h"

#include <optional>
#include <tuple>
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

// Checks a plan and the code of the model: runs the model plain and parallelized on the same inputs, and compares the
// outputs of all modules, the result, and the gradients of inputs and parameters. Call it once before
// parallelize_module, with a small input. It leaves the model as it was; the model need not be cloneable.
//
// Throws the same UsageError on all ranks of the mesh if a value differs. The error names the first module that
// differs, in the order of execution, and says what to write: in the plan (`.sections = 3` for a fused q, k, v; a
// missing entry), or in the code (`view({b, t, heads, -1})` on a local tensor divides the head dim).
//
// Collective: all ranks of the mesh call it, with equal inputs. Pass a DTensor where a style expects a local shard as
// input of the model. The result of the model must be replicated or a DTensor. Dropout is compared too. The model must
// not be parallelized or wrapped yet, and not be on the meta device.
//
// Example:  check_parallel(model, mesh["tp"], plan, tokens);
//           parallelize_module(model, mesh["tp"], plan);
template <class H, class... Inputs>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H>
void check_parallel(H& model, const DeviceMesh& mesh, const Plan& plan, const Inputs&... inputs);
// The same over the mesh of the innermost MeshScope.
template <class H, class... Inputs>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H>
void check_parallel(H& model, const Plan& plan, const Inputs&... inputs);
// The same for any module: `forward` runs the model on the inputs and returns its outputs. It can compute a loss too.
void check_parallel(torch::nn::Module& model, const DeviceMesh& mesh, const Plan& plan, const Tensors& inputs,
                    const ForwardCall& forward);

// Implementation.

template <class H, class... Inputs>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H>
void check_parallel(H& model, const DeviceMesh& mesh, const Plan& plan, const Inputs&... inputs) {
  std::tuple<Inputs...> args(inputs...);
  check_parallel(static_cast<torch::nn::Module&>(*model.ptr()), mesh, plan, tensors_of(args),
                 [&](const Tensors& tensors) {
                   auto given = args;
                   assign_tensors(given, tensors);
                   auto result = std::apply([&](auto&... each) { return model(each...); }, given);
                   return tensors_of(result);
                 });
}

template <class H, class... Inputs>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H>
void check_parallel(H& model, const Plan& plan, const Inputs&... inputs) {
  check_parallel(model, DeviceMesh::current(), plan, inputs...);
}

}  // namespace tessera
