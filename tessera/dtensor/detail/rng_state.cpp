#include "tessera/dtensor/detail/rng_state.h"

#include "tessera/base/detail/hash.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <mutex>

namespace tessera::detail {
namespace {

at::Generator generator_or_default(const std::optional<at::Generator>& generator) {
  return generator && generator->defined() ? *generator : at::detail::getDefaultCPUGenerator();
}

at::Tensor rng_state_kernel(std::optional<at::Generator> generator) {
  auto source = generator_or_default(generator);
  const std::lock_guard lock(source.mutex());
  return source.get_state();
}

void set_rng_state_kernel(const at::Tensor& state, std::optional<at::Generator> generator) {
  auto target = generator_or_default(generator);
  const std::lock_guard lock(target.mutex());
  target.set_state(state);
}

void seed_generator_kernel(std::optional<at::Generator> generator, int64_t seed, int64_t offset) {
  auto target = generator_or_default(generator);
  const std::lock_guard lock(target.mutex());
  target.set_current_seed(hash_combine(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset)));
}

TORCH_LIBRARY_FRAGMENT(tessera, m) {
  constexpr auto kAnyDevice = c10::DispatchKey::CompositeExplicitAutograd;
  m.def("rng_state(Generator? generator) -> Tensor", torch::dispatch(kAnyDevice, TORCH_FN(rng_state_kernel)));
  m.def("set_rng_state(Tensor state, Generator? generator) -> ()",
        torch::dispatch(kAnyDevice, TORCH_FN(set_rng_state_kernel)));
  m.def("philox_seed_generator(Generator? generator, int seed, int offset) -> ()",
        torch::dispatch(kAnyDevice, TORCH_FN(seed_generator_kernel)));
}

}  // namespace

at::Tensor rng_state(const std::optional<at::Generator>& generator) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::rng_state", "")
                             .typed<at::Tensor(std::optional<at::Generator>)>();
  return op.call(generator);
}

void set_rng_state(const at::Tensor& state, const std::optional<at::Generator>& generator) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::set_rng_state", "")
                             .typed<void(const at::Tensor&, std::optional<at::Generator>)>();
  op.call(state, generator);
}

void seed_generator(const at::Generator& generator, uint64_t seed, uint64_t offset) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("tessera::philox_seed_generator", "")
                             .typed<void(std::optional<at::Generator>, int64_t, int64_t)>();
  op.call(generator, static_cast<int64_t>(seed), static_cast<int64_t>(offset));
}

}  // namespace tessera::detail
