#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/hooks.h"

#include <functional>
#include <string>

namespace tessera {

// Called for every module, outermost first, with its name ("" for the whole): distributes what it wants to of the
// module's own parameters, with distribute_in_place.
using PartitionFn = std::function<void(const std::string& name, Module& module, const DeviceMesh& mesh)>;
// Replace the inputs or the outputs of the whole module: usually from_local and to_local.
using ModuleIOFn = std::function<Replacement(Module& module, const Tensors& tensors, const DeviceMesh& mesh)>;

struct DistributeModuleFns {
  PartitionFn partition = {};
  ModuleIOFn input = {};
  ModuleIOFn output = {};
};

// Lays the parameters and buffers of a module out over the mesh, in place: as partition says, and replicated where it
// says nothing. The first rank's values count. If anything throws, the module is as it was.
void distribute_module(Module& module, const DeviceMesh& mesh, DistributeModuleFns fns = {});

}  // namespace tessera
