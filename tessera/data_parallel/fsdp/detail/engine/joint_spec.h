#pragma once
#include "tessera/mesh/device_mesh.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <string>

namespace tessera::data_parallel::fsdp {

// The spec of parameter `name` after FSDP shards it along `dim` over the last axis of `mesh`. `unsharded` is its spec
// before: a DTensor over other axes of the same root mesh, for example tensor parallel. FSDP shards each rank's local
// tensor:
//
//   unsharded 13 x 4 [S(0)] on tp=2, sharded along dim 0 over dp=2  ->  [SS(0,2), S(0)] on dp=2,tp=2
//     tp shards 7 6, of which the dp ranks have 4 3 and 3 3
//
// Throws UsageError that names the parameter if no placements describe the result.
SpecRef joint_spec(const std::string& name, const TensorSpec& unsharded, const DeviceMesh& mesh, int64_t dim);

}  // namespace tessera::data_parallel::fsdp
