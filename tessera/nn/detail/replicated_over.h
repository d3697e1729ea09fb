#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/nn/hooks.h"

// Which modules are parallelized, and over which mesh. The plain tensors inside of such a module are equal on all ranks
// of the mesh, except the local tensors that a style returns.
namespace tessera {

// parallelize_module sets this for its root. A clone of the module gets it too. No mesh: removes it.
void set_replicated_over(Module& module, const DeviceMesh& mesh);

// The mesh of a module for which it was set; no mesh for others.
DeviceMesh replicated_over(const Module& module);

// The mesh of the innermost running module for which it was set; no mesh if no running module has one.
DeviceMesh running_module_is_replicated_over();

// Whether it was set for any module with this mesh.
bool is_tensor_parallel_mesh(const DeviceMesh& mesh);

}  // namespace tessera
