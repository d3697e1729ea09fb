#pragma once
#include "tessera/dtensor/detail/random_ops.h"
#include "tessera/placement/detail/tensor_spec.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <unordered_set>

namespace torch {
class Library;
}

// Counter-based random numbers: element i of fill number n is philox(seed, n, i), where i is the index in the global
// tensor. So a tensor gets the same bits on 1, 2, 4 or 8 ranks, with any placements. A plain tensor that is filled here
// gets the same bits too.
//
// This generator serves in-place random ops, *_like and dropout on DTensors (so also torch::nn::init and
// torch::nn::Dropout), and all random ops inside deferred_init. torch::nn constructors outside deferred_init fill plain
// tensors from LibTorch's own generator.
//
// Each rank counts its fills. The counts stay equal because all ranks run the same program. If only some ranks draw (a
// pipeline stage, a rank-dependent branch), use a SeedScope for these draws.
namespace tessera {

// Seeds this rank's generator and resets its count of fills. Use the same seed on every rank, or replicas differ. Call
// it after init(): it seeds the thread's current World. Without a World it seeds the generator that this thread uses
// for plain tensors.
void manual_seed(uint64_t seed);

namespace random {

// Seed and count of fills of this thread's World, or of the thread if it has no World.
RandomState& state();

// While alive, draws use the given seed and a count of fills that starts at 0. Then the previous state is restored.
class SeedScope {
 public:
  explicit SeedScope(uint64_t seed);  // replaces the state of this thread's World, or of the thread
  ~SeedScope();
  SeedScope(const SeedScope&) = delete;

 private:
  World world_;  // empty: the thread's own generator
  RandomState before_;
};

// Random ops that give a plain tensor the same bits as a DTensor.
at::Tensor& uniform_(at::Tensor& t, double from = 0, double to = 1);
at::Tensor& normal_(at::Tensor& t, double mean = 0, double std = 1);
at::Tensor& bernoulli_(at::Tensor& t, double p = 0.5);
at::Tensor rand(at::IntArrayRef size, at::TensorOptions options = {});
at::Tensor randn(at::IntArrayRef size, at::TensorOptions options = {});
// Gives the same bits as torch::dropout on a DTensor. Differentiable.
at::Tensor dropout(const at::Tensor& t, double p, bool train);

}  // namespace random

namespace detail {

// The random state that DTensors of a mesh use.
RandomState& random_state(const MeshState& mesh);

// Calls f(draw) for the next fill. The fill is counted only if f does not throw.
template <class F>
auto with_draw(RandomState& state, at::IntArrayRef sizes, at::IntArrayRef ranges, F f) {
  const random_ops::Draw draw{static_cast<int64_t>(state.seed), static_cast<int64_t>(state.offset), sizes, ranges};
  if constexpr (std::is_void_v<decltype(f(draw))>) {
    f(draw);
    state.offset++;
  } else {
    auto result = f(draw);
    state.offset++;
    return result;
  }
}

// Throws UsageError if `t` is undefined, or requires grad while grad mode is on.
void check_fillable(const at::Tensor& t, const char* function);

// Fills a plain tensor by f(draw), with its own sizes as the global sizes.
template <class F>
at::Tensor& fill_plain(at::Tensor& t, const char* function, F f) {
  check_fillable(t, function);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    with_draw(random::state(), t.sizes(), {}, f);
  }
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  return t;
}

// Registers kernels for aten's random ops that use this generator, for DTensors and plain tensors. Adds the names of
// these ops to `done`.
void register_random_fills(torch::Library& aten, std::unordered_set<std::string>& done);

}  // namespace detail
}  // namespace tessera
