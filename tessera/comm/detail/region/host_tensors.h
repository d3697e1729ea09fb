#pragma once
#include <ATen/core/Tensor.h>

#include <functional>
#include <utility>
#include <vector>

namespace tessera::comm::region {

// The tensors of one collective as contiguous CPU tensors. A CPU tensor is used directly. A device tensor is copied
// through pinned memory, so that several ranks can share a device.
class HostTensors {
 public:
  at::Tensor input(const at::Tensor& x);
  at::Tensor output(const at::Tensor& x);
  at::Tensor inout(const at::Tensor& x);
  // Copies the outputs back to device tensors. Null if there is nothing to copy.
  std::function<void()> finish();

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_back_;  // to, from
};

}  // namespace tessera::comm::region
