#pragma once
#include <cstdint>

namespace tessera::testing {

// While alive, LibTorch's default generator of the CPU is one of this thread alone. Otherwise all threads share one
// generator, so that torch::manual_seed() and the draws of one rank change those of the others.
class RankGeneratorScope {
 public:
  explicit RankGeneratorScope(uint64_t seed);
  ~RankGeneratorScope();
  RankGeneratorScope(const RankGeneratorScope&) = delete;
};

}  // namespace tessera::testing
