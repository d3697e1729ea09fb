#include "tessera/compile/detail/trace/generator_states.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/trace/thread_ranks.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <mutex>
#include <string_view>

namespace tessera::compiler {
namespace {

constexpr uint64_t kSeedOfKnownGenerators = 0x7e55e7a5eed;

at::Tensor state_now(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

std::string_view bytes_of_state(const at::Tensor& state) {
  return {static_cast<const char*>(state.const_data_ptr()), state.nbytes()};
}

size_t hash_of_state(const at::Tensor& state) { return std::hash<std::string_view>()(bytes_of_state(state)); }

}  // namespace

GeneratorStates::GeneratorStates(const std::vector<at::Generator>& known) {
  find(at::detail::getDefaultCPUGenerator()).shared = ranks_are_threads();
  for (const auto& generator : known) {
    if (generator == known_[0].generator) continue;
    auto& each = find(generator);
    {
      const std::lock_guard lock(each.generator.mutex());
      each.generator.set_current_seed(kSeedOfKnownGenerators);
    }
    each.expected = state_now(generator);
    each.earlier = {hash_of_state(each.expected)};
  }
}

GeneratorStates::~GeneratorStates() {
  for (auto& each : known_) {
    const std::lock_guard lock(each.generator.mutex());
    each.generator.set_state(each.before);
  }
}

GeneratorStates::Known& GeneratorStates::find(const at::Generator& generator) {
  for (auto& each : known_)
    if (each.generator == generator) return each;
  const auto now = state_now(generator);
  known_.push_back({generator, now, now, {hash_of_state(now)}});
  return known_.back();
}

std::optional<at::Tensor> GeneratorStates::set_on_host(const at::Generator& generator) {
  auto& each = find(generator);
  const auto now = state_now(generator);
  if (each.shared || bytes_of_state(now) == bytes_of_state(each.expected)) return {};
  const auto hash = hash_of_state(now);
  TESSERA_CHECK(std::find(each.earlier.begin(), each.earlier.end(), hash) == each.earlier.end(), UsageError,
                "compile: the step sets a random generator to a state that it read on the host (get_state, set_state), "
                "which a compiled step cannot do again; use tessera::checkpoint to draw the same numbers twice, or a "
                "seed");
  each.expected = now;
  each.earlier.push_back(hash);
  return now;
}

void GeneratorStates::drew(const at::Generator& generator) {
  auto& each = find(generator);
  each.expected = state_now(generator);
  each.earlier.push_back(hash_of_state(each.expected));
}

std::vector<at::Generator> GeneratorStates::generators() const {
  std::vector<at::Generator> all;
  for (const auto& each : known_) all.push_back(each.generator);
  return all;
}

}  // namespace tessera::compiler
