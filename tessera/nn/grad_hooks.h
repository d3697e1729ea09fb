#pragma once
#include "tessera/base/visit.h"

#include <functional>
#include <memory>

// Hooks on gradients that LibTorch does not have. (LibTorch has Tensor::register_hook.)
namespace tessera {

// Removes the hook that it was returned for. The destructor does not remove the hook, as in PyTorch.
class GradHookHandle {
 public:
  GradHookHandle() = default;
  explicit GradHookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  void remove() {  // a second call does nothing
    if (auto remove = std::exchange(remove_, nullptr)) remove();
  }

 private:
  std::function<void()> remove_;
};

// When a multi-grad hook runs: after all gradients, or after the first one.
enum class MultiGradMode : uint8_t { All, Any };

// PyTorch's register_multi_grad_hook. With All, hook(gradients) runs once per backward, after the backward computed all
// gradients of `tensors` that it computes at all; the other gradients are undefined. With Any, the hook runs once per
// backward, with the first gradient only.
// Example:  register_multi_grad_hook({a, b}, [&](const Tensors& grads) { log_norm(grads); });
GradHookHandle register_multi_grad_hook(const Tensors& tensors, std::function<void(const Tensors&)> hook,
                                        MultiGradMode mode = MultiGradMode::All);

// PyTorch's Tensor.register_post_accumulate_grad_hook: hook(leaf) runs after backward added a gradient to leaf.grad().
// LibTorch stores at most one such hook per tensor. Tessera installs a list there, so a gradient reducer, an optimizer
// that steps in backward and a user hook can coexist. Hooks run in the order of registration.
GradHookHandle register_post_accumulate_grad_hook(const at::Tensor& leaf, std::function<void(const at::Tensor&)> hook);

// True if the running backward reaches `leaf`, even if it computes an undefined gradient for it. Call it inside a
// backward: in an autograd function, a hook or a final callback.
bool will_accumulate(const at::Tensor& leaf);

}  // namespace tessera
