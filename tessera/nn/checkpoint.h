#pragma once
#include "tessera/base/visit.h"
#include "tessera/nn/detail/selective.h"

#include <ATen/core/grad_mode.h>

#include <concepts>
#include <functional>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>

// Activation checkpointing (PyTorch: torch.utils.checkpoint). Autograd does not save the intermediate tensors of the
// function. Backward runs the function again when it first needs one of them. This costs one more forward of the
// function and frees the memory of its activations.
//
//   auto y = checkpoint(block, x);                       // block(x): bitwise the same output and gradients
//   auto y = checkpoint({.keep = keep_ops({"aten::mm"})}, block, x);
//   auto y = checkpoint([&](auto q, auto k) { return attend(q, k, mask); }, q, k);
//
// The semantics are those of use_reentrant=False in PyTorch. autograd::grad, a backward for some of the inputs, and a
// second backward work. Hooks on parameters fire once. Checkpoints nest: the innermost checkpoint handles a tensor, and
// the outer checkpoint recomputes the arguments of the inner one.
//
// Recomputation uses the same arguments, random numbers, autocast state, World and policies as forward. The function
// must execute the same ops. Otherwise backward throws a UsageError that names the first op that differs from forward.
// Other state that the function reads (parameters, captured variables, buffers) must not change before backward.
namespace tessera {

// Options of checkpoint(), with PyTorch's names.
struct CheckpointOptions {
  bool preserve_rng_state = true;  // use the same random numbers in recomputation; false: do not save generator states
  bool early_stop = true;          // stop recomputation after the last tensor that backward needs
  bool determinism_check = true;   // compare ops, sizes, dtypes, devices and placements of forward and recomputation
  KeepPolicy keep = {};            // selective checkpointing: outputs to save instead of recompute; empty: none
};

// True while a backward on this thread runs a checkpointed function again. FSDP hooks use it, for example.
bool recomputing();

namespace detail {

class CheckpointFrame;

// The scope of the forward of one checkpointed call. `recompute` runs the function on the tensors of its arguments.
class CheckpointForward {
 public:
  CheckpointForward(const CheckpointOptions& options, const Tensors& inputs, std::function<void(Tensors)> recompute);
  ~CheckpointForward();
  CheckpointForward(const CheckpointForward&) = delete;

 private:
  struct Guards;
  std::unique_ptr<Guards> guards_;
};

// A stored argument with the value category of the original one: an original rvalue may be moved from.
template <class Arg, class Stored>
decltype(auto) forward_stored(Stored& stored) {
  if constexpr (std::is_same_v<std::remove_cvref_t<Arg>, Stored>)
    return static_cast<Arg&&>(stored);
  else
    return (stored);  // an array or a function, stored as a pointer
}

}  // namespace detail

// Runs fn(args...) as a checkpoint. Copies `fn` and `args` for recomputation. Autograd saves the tensors in `args` as
// it saves any tensor, so pass tensors as arguments instead of capturing them. base/visit.h explains which argument
// types may contain tensors. With gradients disabled this is a plain call.
template <class Fn, class... Args>
std::invoke_result_t<Fn&, Args...> checkpoint(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  static_assert((can_visit<Args> && ...),
                "checkpoint: the tensors in an argument of this type cannot be found; define tessera_visit (visit.h)");
  if (!at::GradMode::is_enabled()) return std::invoke(fn, std::forward<Args>(args)...);
  using Stored = std::tuple<std::decay_t<Args>...>;
  Stored stored(args...);
  const Tensors inputs = tensors_of(stored);
  assign_tensors(stored, Tensors(inputs.size()));
  const detail::CheckpointForward forward(
      options, inputs, [fn = std::decay_t<Fn>(fn), stored = std::move(stored)](Tensors tensors) mutable {
        Stored copy = stored;
        assign_tensors(copy, tensors);
        tensors.clear();
        std::apply([&](auto&... each) { std::invoke(fn, detail::forward_stored<Args>(each)...); }, copy);
      });
  return std::invoke(fn, std::forward<Args>(args)...);
}

// The same with default options.
template <class Fn, class... Args>
requires(!std::same_as<std::remove_cvref_t<Fn>, CheckpointOptions>) std::invoke_result_t<Fn&, Args...> checkpoint(
    Fn&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions{}, std::forward<Fn>(fn), std::forward<Args>(args)...);
}

}  // namespace tessera
