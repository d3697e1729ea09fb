#pragma once
#include "tessera/compile/detail/trace/live_numbers.h"
#include "tessera/dtensor/random.h"

#include <ATen/core/Generator.h>

namespace tessera::compiler {

// The random streams are as they were when this goes: what a trace draws, nobody has drawn.
class StreamsRestored {
 public:
  StreamsRestored();
  ~StreamsRestored();
  StreamsRestored(const StreamsRestored&) = delete;

  int64_t draws() const;  // so far, of our own stream
  LiveNumbers live_numbers() const;

 private:
  at::Generator generator_;
  at::Tensor before_;
  RandomState own_;
};

void advance_stream(int64_t draws);  // as a program that draws so often does

}  // namespace tessera::compiler
