#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace tessera::comm::region {

// The tensors of one collective as the region sees them: contiguous and on the host. A tensor that lies there is taken
// as it is; one on a device travels through pinned memory, so that several ranks can share a device.
class HostTensors {
 public:
  at::Tensor given(const at::Tensor& x);  // is read
  at::Tensor taken(const at::Tensor& x);  // is written
  at::Tensor both(const at::Tensor& x);
  // Copies back what was taken for tensors on a device. Null if there is nothing to copy.
  std::function<void()> finish();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> back_;  // to, from
};

}  // namespace tessera::comm::region
