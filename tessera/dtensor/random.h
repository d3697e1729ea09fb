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

// Random numbers by counter: element i of the n-th fill is philox(seed, n, i), where i is its place in the global
// tensor. So a tensor gets the same bits on 1, 2, 4 or 8 ranks, however it is cut, and so does a plain one filled here.
// In-place random ops, *_like and dropout on distributed tensors (and so torch::nn::init and torch::nn::Dropout) draw
// from here, and all that a module draws inside deferred_init; stock torch::nn constructors outside of it, which fill
// plain tensors, keep LibTorch's own stream.
//
// Each rank counts its own fills. They stay in step because all ranks run the same program; where some ranks draw alone
// (a pipeline stage, a rank-dependent branch), give those tensors numbers of their own under a SeedScope.
namespace tessera {

// Seeds this rank's stream: the same seed on every rank, or replicas will differ. Also resets the count of fills.
// Call it after init(): it seeds the thread's current World if there is one, else what plain tensors of this thread
// use.
void manual_seed(uint64_t seed);

namespace random {

// The stream of this thread's World, else of the thread itself.
RandomState& state();

// Draws come from a stream of their own while alive; the stream of before goes on afterwards where it stood.
class SeedScope {
 public:
  explicit SeedScope(uint64_t seed);
  ~SeedScope();
  SeedScope(const SeedScope&) = delete;

 private:
  World world_;  // empty: the thread's own stream
  RandomState before_;
};

// On plain tensors as on distributed ones: the same bits.
at::Tensor& uniform_(at::Tensor& t, double from = 0, double to = 1);
at::Tensor& normal_(at::Tensor& t, double mean = 0, double std = 1);
at::Tensor& bernoulli_(at::Tensor& t, double p = 0.5);
at::Tensor rand(at::IntArrayRef size, at::TensorOptions options = {});
at::Tensor randn(at::IntArrayRef size, at::TensorOptions options = {});
at::Tensor dropout(const at::Tensor& t, double p, bool train);  // as torch::dropout draws it; differentiable

}  // namespace random

namespace detail {

// The stream that distributed tensors of a mesh draw from.
RandomState& random_state(const MeshState& mesh);

// Calls f(draw) for the next fill of the stream. The fill counts only if f comes back.
template <class F>
auto with_draw(RandomState& state, at::IntArrayRef sizes, at::IntArrayRef runs, F f) {
  const random_ops::Draw draw{static_cast<int64_t>(state.seed), static_cast<int64_t>(state.offset), sizes, runs};
  if constexpr (std::is_void_v<decltype(f(draw))>) {
    f(draw);
    state.offset++;
  } else {
    auto result = f(draw);
    state.offset++;
    return result;
  }
}

void check_fillable(const at::Tensor& t, const char* who);

// Fills a plain tensor as the whole of itself, by f(draw).
template <class F>
at::Tensor& fill_plain(at::Tensor& t, const char* who, F f) {
  check_fillable(t, who);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    with_draw(random::state(), t.sizes(), {}, f);
  }
  if (!t.is_inference()) t.unsafeGetTensorImpl()->bump_version();
  return t;
}

// Puts kernels that draw from the stream, for distributed tensors and for plain ones, on aten's random fills and what
// is made of them by hand. Adds the names of those ops to `done`.
void register_random_fills(torch::Library& aten, std::unordered_set<std::string>& done);

}  // namespace detail
}  // namespace tessera
