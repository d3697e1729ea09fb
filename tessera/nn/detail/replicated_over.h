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

// Whether a module for which it was set runs on this thread.
bool is_parallelized_module_running();

// The mesh of the model of which code runs on this thread: that of the innermost running module for which it was set.
// If no such module runs: that of a module inside or around the outermost running one. The blocks of a model can be
// parallelized one by one, and the root of a model can be called without a Tessera holder. No mesh: code of another
// model, or outside of all modules.
DeviceMesh running_module_is_replicated_over();

// Whether it was set for any module with this mesh.
bool is_tensor_parallel_mesh(const DeviceMesh& mesh);

}  // namespace tessera
