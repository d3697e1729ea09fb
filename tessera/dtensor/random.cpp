#include "tessera/dtensor/random.h"

#include "tessera/base/error.h"
#include "tessera/dtensor/detail/meta.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

namespace tessera {
namespace {

// Used for plain tensors on a thread without a World.
thread_local RandomState thread_state;

RandomState& state_of(const World& world) { return world ? world.random() : thread_state; }

World current_world() { return World::has_current() ? World::current() : World(); }

}  // namespace

void manual_seed(uint64_t seed) { random::state() = {seed, 0}; }

RandomState& detail::random_state(const MeshState& mesh) { return state_of(mesh.world); }

void detail::check_fillable(const at::Tensor& t, const char* function) {
  TESSERA_CHECK(t.defined(), UsageError, "random::", function, ": the tensor is undefined");
  TESSERA_CHECK(!t.requires_grad() || !at::GradMode::is_enabled(), UsageError, "random::", function,
                ": the tensor requires grad and would be overwritten; call it under a torch::NoGradGuard");
}

namespace random {

using detail::fill_plain;

RandomState& state() { return state_of(current_world()); }

SeedScope::SeedScope(uint64_t seed) : world_(current_world()), before_(state_of(world_)) {
  state_of(world_) = {seed, 0};
}
SeedScope::~SeedScope() { state_of(world_) = before_; }

at::Tensor& uniform_(at::Tensor& t, double from, double to) {
  if (is_dtensor(t)) return t.uniform_(from, to), t;
  return fill_plain(t, "uniform_", [&](const auto& draw) { random_ops::uniform_(t, from, to, draw); });
}

at::Tensor& normal_(at::Tensor& t, double mean, double std) {
  if (is_dtensor(t)) return t.normal_(mean, std), t;
  return fill_plain(t, "normal_", [&](const auto& draw) { random_ops::normal_(t, mean, std, draw); });
}

at::Tensor& bernoulli_(at::Tensor& t, double p) {
  if (is_dtensor(t)) return t.bernoulli_(p), t;
  return fill_plain(t, "bernoulli_", [&](const auto& draw) { random_ops::bernoulli_(t, p, draw); });
}

namespace {

template <class Fill>
at::Tensor make_filled(at::IntArrayRef size, const at::TensorOptions& options, Fill fill) {
  at::Tensor t;
  {
    at::NoGradGuard no_grad;
    t = at::empty(size, options.requires_grad(false));
    fill(t);
  }
  return t.set_requires_grad(options.requires_grad());
}

}  // namespace

at::Tensor rand(at::IntArrayRef size, at::TensorOptions options) {
  return make_filled(size, options, [](at::Tensor& t) { uniform_(t); });
}

at::Tensor randn(at::IntArrayRef size, at::TensorOptions options) {
  return make_filled(size, options, [](at::Tensor& t) { normal_(t); });
}

// The same ops as torch::dropout on a CPU tensor, so that both give the same bits and count the same number of fills.
at::Tensor dropout(const at::Tensor& t, double p, bool train) {
  if (is_dtensor(t)) return at::dropout(t, p, train);
  TESSERA_CHECK(p >= 0 && p <= 1, UsageError, "random::dropout with p ", p, ": a probability is between 0 and 1");
  if (p == 0 || !train || t.numel() == 0) return t;
  if (p == 1) return t.mul(at::zeros({}, t.options()));
  auto noise = at::empty_like(t.detach());
  bernoulli_(noise, 1 - p);
  return t.mul(noise.div_(1 - p));
}

}  // namespace random
}  // namespace tessera
