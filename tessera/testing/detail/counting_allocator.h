#pragma once
#include <cstdint>

namespace tessera::testing {

// Counts the memory that the CPU allocator allocates in this process, on all threads, while alive. Only one may be
// alive. Memory that outlives the scope is freed normally and no longer counted.
// Example:  CountingAllocator count;   step();   EXPECT_LE(count.peak_bytes(), 3 * kBytesOfParameters);
class CountingAllocator {
 public:
  CountingAllocator();
  ~CountingAllocator();
  CountingAllocator(const CountingAllocator&) = delete;

  int64_t live_bytes() const;   // allocated since construction and not yet freed
  int64_t peak_bytes() const;   // the maximum of live_bytes() since construction or reset_peak()
  int64_t allocations() const;  // number of allocations since construction
  int64_t largest() const;      // bytes of the largest allocation since construction
  void reset_peak();
};

}  // namespace tessera::testing
