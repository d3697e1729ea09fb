#include "tessera/compile/detail/trace/random_state_guard.h"

namespace tessera::compiler {
namespace {

constexpr uint64_t kTracedSeed = 0x5eed0f7e55e7a000, kTracedOffset = uint64_t{1} << 40;

}  // namespace

RandomStateGuard::RandomStateGuard() : before_(random::state()) {
  random::state().seed = kTracedSeed;
  random::state().offset = kTracedOffset;
}

RandomStateGuard::~RandomStateGuard() { random::state() = before_; }

RandomStateGuard::Advance RandomStateGuard::advance() const {
  const auto& now = random::state();
  if (now.seed != kTracedSeed) return {now.seed, now.offset};
  return {{}, now.offset - kTracedOffset};
}

void RandomStateGuard::Advance::apply() const {
  auto& state = random::state();
  state.offset = seed ? draws : state.offset + draws;
  if (seed) state.seed = *seed;
}

RuntimeScalars RandomStateGuard::runtime_scalars() const {
  return {static_cast<int64_t>(kTracedSeed), static_cast<int64_t>(kTracedOffset)};
}

}  // namespace tessera::compiler
