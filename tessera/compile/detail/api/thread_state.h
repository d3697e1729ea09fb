#pragma once
#include <cstdint>
#include <string>

namespace tessera::compiler {

// The state of this thread and of LibTorch's global context that decides which ops a function calls: grad mode,
// inference mode, autocast (on, dtype, cache, per device type), default dtype, deterministic flags, attention kernels,
// oneDNN, anomaly mode, the number of threads, the precision of float32 products, the dispatch keys that this thread
// includes and excludes, and the current CUDA stream if CUDA is in use. Equal words mean equal state.
struct ThreadState {
  uint64_t modes = 0;
  uint64_t included_keys = 0, excluded_keys = 0;
  int64_t stream = 0;
  bool operator==(const ThreadState&) const = default;

  static ThreadState now();
  // What differs from `before`: "grad mode is off, it was on".
  std::string difference(const ThreadState& before) const;
};

}  // namespace tessera::compiler
