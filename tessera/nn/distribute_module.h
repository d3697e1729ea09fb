#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/hooks.h"

#include <functional>
#include <string>

namespace tessera {

// PyTorch's partition_fn. Runs for every submodule, outermost first, with its name ("" for the root). It calls
// distribute_in_place for those of the submodule's own parameters that it wants to distribute.
using PartitionFn = std::function<void(const std::string& name, Module& module, const DeviceMesh& mesh)>;
// PyTorch's input_fn and output_fn: replaces the inputs or outputs of the root module, usually by from_local or
// to_local.
using ModuleIOFn = std::function<Replacement(Module& module, const Tensors& tensors, const DeviceMesh& mesh)>;

// The functions of distribute_module. An empty function has no effect.
struct DistributeModuleFns {
  PartitionFn partition = {};  // partition_fn
  ModuleIOFn input = {};       // input_fn
  ModuleIOFn output = {};      // output_fn
};

// Distributes the parameters and buffers of a module over the mesh, in place. fns.partition distributes some of them;
// the others become replicated, with the values of the first rank. If anything throws, the module is unchanged.
// Example:  distribute_module(*model, mesh, {.partition = [](const std::string&, Module& m, const DeviceMesh& mesh) {
//             if (auto* fc = dynamic_cast<torch::nn::LinearImpl*>(&m))
//               distribute_in_place(fc->weight, mesh, {Shard(0)});
//           }});
void distribute_module(Module& module, const DeviceMesh& mesh, DistributeModuleFns fns = {});

}  // namespace tessera
