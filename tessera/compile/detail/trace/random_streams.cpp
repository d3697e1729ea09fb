#include "tessera/compile/detail/trace/random_streams.h"

#include <ATen/CPUGeneratorImpl.h>

namespace tessera::compiler {

StreamsRestored::StreamsRestored()
    : generator_(at::detail::getDefaultCPUGenerator()), before_(generator_.get_state()), own_(random::state()) {}

StreamsRestored::~StreamsRestored() {
  generator_.set_state(before_);
  random::state() = own_;
}

int64_t StreamsRestored::draws() const { return static_cast<int64_t>(random::state().offset - own_.offset); }

LiveNumbers StreamsRestored::live_numbers() const {
  LiveNumbers numbers;
  numbers.seed = static_cast<int64_t>(own_.seed);
  numbers.offset = static_cast<int64_t>(own_.offset);
  return numbers;
}

void advance_stream(int64_t draws) { random::state().offset += static_cast<uint64_t>(draws); }

}  // namespace tessera::compiler
