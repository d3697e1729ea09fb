#include "tessera/data_parallel/distributed_data_parallel.h"

#include "tessera/base/error.h"
#include "tessera/data_parallel/detail/named_tensor.h"
#include "tessera/dtensor/dtensor.h"

namespace tessera {

std::vector<DistributedParameter> pre_dp_module_transform(const torch::nn::Module& module) {
  std::vector<DistributedParameter> found;
  for (const auto& [name, value] : data_parallel::parameters_of(module)) {
    if (!is_dtensor(value)) continue;
    const DTensor tensor(value);
    TESSERA_CHECK(tensor.device_mesh().get_coordinate(), UsageError, "pre_dp_module_transform: parameter ", name,
                  " is ", tensor, ", on a mesh that this rank is not part of");
    found.push_back({name, detail::meta_of(value).spec});
  }
  return found;
}

}  // namespace tessera
