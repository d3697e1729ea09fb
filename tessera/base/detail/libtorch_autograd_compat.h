#pragma once
#include "tessera/base/detail/libtorch_compat.h"

#include <torch/csrc/autograd/function.h>

namespace tessera::libtorch {

// A node of the autograd graph is held by intrusive_ptr since 2.13, by shared_ptr before.
template <class T, class... Args>
auto make_node(Args&&... args) {
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  return c10::make_intrusive<T>(std::forward<Args>(args)...);
#else
  return std::shared_ptr<T>(new T(std::forward<Args>(args)...), torch::autograd::deleteNode);
#endif
}

}  // namespace tessera::libtorch
