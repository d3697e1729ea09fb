#pragma once
#include "tessera/base/visit.h"

#include <functional>
#include <memory>

// Hooks on gradients, beside Tensor::register_hook, which LibTorch has.
namespace tessera {

// Removes what it was given for. Going out of scope it does nothing, as in PyTorch.
class GradHookHandle {
 public:
  GradHookHandle() = default;
  explicit GradHookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() {
    if (auto remove = std::exchange(remove_, nullptr)) remove();
  }

 private:
  std::function<void()> remove_;
};

enum class MultiGradMode : uint8_t { All, Any };

// Once a backward has computed the gradients of all `tensors` that it is going to compute, calls hook(gradients), with
// undefined ones for the rest. Under Any: as soon as the first is there, with it alone. Each backward anew.
GradHookHandle register_multi_grad_hook(const Tensors& tensors, std::function<void(const Tensors&)> hook,
                                        MultiGradMode mode = MultiGradMode::All);

// Runs after a gradient was added to leaf.grad(). LibTorch has one such place a tensor; this is a list in it, so that
// a reducer, an optimizer in backward and a hook of yours can share it. In order of registration.
GradHookHandle register_post_accumulate_grad_hook(const at::Tensor& leaf, std::function<void(const at::Tensor&)> hook);

// Inside of a backward, hooks and final callbacks included: does it reach `leaf`, with or without a gradient for it?
bool will_accumulate(const at::Tensor& leaf);

}  // namespace tessera
