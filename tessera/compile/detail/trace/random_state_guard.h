#pragma once
#include "tessera/compile/detail/trace/runtime_scalars.h"
#include "tessera/dtensor/random.h"

#include <ATen/core/Generator.h>

namespace tessera::compiler {

// Restores the random state of this thread on destruction: LibTorch's CPU generator and Tessera's stream.
// A traced run thus draws no random numbers from the user's point of view.
class RandomStateGuard {
 public:
  RandomStateGuard();
  ~RandomStateGuard();
  RandomStateGuard(const RandomStateGuard&) = delete;

  int64_t draws() const;  // from Tessera's stream since construction
  RuntimeScalars runtime_scalars() const;

 private:
  at::Generator generator_;
  at::Tensor generator_state_;
  RandomState stream_state_;
};

// Advances Tessera's stream by the draws of one run of a program.
void advance_stream(int64_t draws);

}  // namespace tessera::compiler
