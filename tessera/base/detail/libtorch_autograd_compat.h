#pragma once
#include "tessera/base/detail/libtorch_compat.h"

#include <torch/csrc/autograd/function.h>

namespace tessera::libtorch {

// Creates a node of the autograd graph. LibTorch uses intrusive_ptr since 2.13, and shared_ptr before.
template <class T, class... Args>
auto make_node(Args&&... args) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
#else
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
#endif
}

}  // namespace tessera::libtorch
