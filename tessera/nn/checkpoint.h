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

// Activation checkpointing: a function's intermediate tensors are not saved for backward but computed again when
// backward first needs one of them. Costs one more forward of the function, saves its activations.
//
//   auto y = checkpoint(block, x);                       block(x), the same bits, the same gradients
//   auto y = checkpoint({.keep = keep_ops({"aten::mm"})}, block, x);
//   auto y = checkpoint([&](auto q, auto k) { return attend(q, k, mask); }, q, k);
//
// As PyTorch's use_reentrant=False: works with autograd::grad, with a backward for some inputs, with backward twice,
// nested, and with hooks on parameters, which fire once. Nested: a tensor belongs to the innermost checkpoint; the
// arguments of an inner one are among what the outer one computes again.
//
// The function is run again with the same arguments, random numbers, autocast, world and policies. It must do the same
// then; if it does not, backward throws a UsageError that names the op at which it parted from forward. What it depends
// on beyond that must not change in between: parameters, captured variables, buffers that it writes to.
namespace tessera {

struct CheckpointOptions {
  bool preserve_rng_state = true;  // draw the same random numbers again; false saves the copy of the generators' state
  bool early_stop = true;          // stop recomputing at the last tensor that is needed
  bool determinism_check = true;   // compare ops, sizes, dtypes, devices and placements of forward and recomputation
  KeepPolicy keep = {};            // selective: results that are kept instead of computed again; empty: none
};

// Is a checkpointed function being run again on this thread, inside a backward? Hooks that gather or release
// parameters want to know.
bool recomputing();

namespace detail {

class CheckpointFrame;

// Forward of a checkpointed call, while alive. `again` runs the function on the arguments' tensors.
class CheckpointForward {
 public:
  CheckpointForward(const CheckpointOptions& options, const Tensors& inputs, std::function<void(Tensors)> again);
  ~CheckpointForward();
  CheckpointForward(const CheckpointForward&) = delete;

 private:
  struct Guards;
  std::unique_ptr<Guards> guards_;
};

// A kept argument as it was given: what was an rvalue may be taken.
template <class Arg, class Kept>
decltype(auto) as_given(Kept& kept) {
  if constexpr (std::is_same_v<std::remove_cvref_t<Arg>, Kept>)
    return static_cast<Arg&&>(kept);
  else
    return (kept);  // an array or a function, kept as a pointer
}

}  // namespace detail

// Runs fn(args...). `fn` and `args` are copied for the second run, the tensors in `args` apart, which autograd keeps as
// it keeps what it saves: so give tensors as arguments rather than capture them. Types with tensors in them: visit.h.
// Without gradients it is a plain call.
template <class Fn, class... Args>
std::invoke_result_t<Fn&, Args...> checkpoint(const CheckpointOptions& options, Fn&& fn, Args&&... args) {
  static_assert((can_visit<Args> && ...),
                "checkpoint: an argument is of a type whose tensors cannot be seen; give it a tessera_visit (visit.h)");
  if (!at::GradMode::is_enabled()) return std::invoke(fn, std::forward<Args>(args)...);
  using Kept = std::tuple<std::decay_t<Args>...>;
  Kept kept(args...);
  const Tensors inputs = tensors_of(kept);
  assign_tensors(kept, Tensors(inputs.size()));
  const detail::CheckpointForward forward(
      options, inputs, [fn = std::decay_t<Fn>(fn), kept = std::move(kept)](Tensors tensors) mutable {
        Kept again = kept;
        assign_tensors(again, tensors);
        tensors.clear();
        std::apply([&](auto&... each) { std::invoke(fn, detail::as_given<Args>(each)...); }, again);
      });
  return std::invoke(fn, std::forward<Args>(args)...);
}

template <class Fn, class... Args>
requires(!std::same_as<std::remove_cvref_t<Fn>, CheckpointOptions>) std::invoke_result_t<Fn&, Args...> checkpoint(
    Fn&& fn, Args&&... args) {
  return checkpoint(CheckpointOptions{}, std::forward<Fn>(fn), std::forward<Args>(args)...);
}

}  // namespace tessera
