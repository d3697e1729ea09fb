#pragma once
#include "tessera/compile/detail/trace/runtime_scalars.h"
#include "tessera/dtensor/random.h"

#include <cstdint>
#include <optional>

namespace tessera::compiler {

// Tessera's random stream of this thread, in one traced run. The run starts with a seed and a count of draws that no
// user has, so that the draws that continue the user's stream differ from those after a manual_seed() or in a
// SeedScope. The destructor restores the user's stream. GeneratorStates does the same for the generators of LibTorch.
class RandomStateGuard {
 public:
  RandomStateGuard();
  ~RandomStateGuard();
  RandomStateGuard(const RandomStateGuard&) = delete;

  // What the run did to the stream: it advanced it by some draws, or it set a seed.
  struct Advance {
    std::optional<uint64_t> seed;  // set by manual_seed()
    uint64_t draws = 0;            // since the start of the run, or since the seed was set
    void apply() const;            // to the stream of this thread
  };
  Advance advance() const;
  RuntimeScalars runtime_scalars() const;

 private:
  RandomState before_;
};

}  // namespace tessera::compiler
