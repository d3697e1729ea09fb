#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <string>

namespace tessera::data_parallel::fsdp {

// How parameter `name`, which lies like `whole` (over other axes of the mesh that `mesh` was sliced from, tensor
// parallel ones say), lies when it is also cut along `dim` over the last axis of `mesh`, each rank's piece by itself:
//
//   whole 13 x 4 [S(0)] on tp=2, cut along 0 over dp=2  ->  [SS(0,2), S(0)] on dp=2,tp=2
//     tp pieces 7 6, of which dp ranks have 4 3 and 3 3
//
// Throws UsageError that names the parameter where there is no such layout.
SpecRef joint_spec(const std::string& name, const TensorSpec& whole, const DeviceMesh& mesh, int64_t dim);

}  // namespace tessera::data_parallel::fsdp
