#include "tessera/compile/detail/trace/random_state_guard.h"

#include <ATen/CPUGeneratorImpl.h>

namespace tessera::compiler {

RandomStateGuard::RandomStateGuard()
    : generator_(at::detail::getDefaultCPUGenerator()),
      generator_state_(generator_.get_state()),
      stream_state_(random::state()) {}

RandomStateGuard::~RandomStateGuard() {
  generator_.set_state(generator_state_);
  random::state() = stream_state_;
}

int64_t RandomStateGuard::draws() const { return static_cast<int64_t>(random::state().offset - stream_state_.offset); }

RuntimeScalars RandomStateGuard::runtime_scalars() const {
  return {static_cast<int64_t>(stream_state_.seed), static_cast<int64_t>(stream_state_.offset)};
}

void advance_stream(int64_t draws) { random::state().offset += static_cast<uint64_t>(draws); }

}  // namespace tessera::compiler
