#pragma once
#include <cstdint>

namespace tessera::testing {

// Counts what the CPU allocator hands out in this process, all threads together, while alive. One at a time.
// Memory that outlives the scope is freed properly and no longer counted.
// Example:  CountingAllocator count;   step();   EXPECT_LE(count.peak_bytes(), 3 * kBytesOfParameters);
class CountingAllocator {
 public:
  CountingAllocator();
  ~CountingAllocator();
  CountingAllocator(const CountingAllocator&) = delete;

  int64_t live_bytes() const;   // allocated since construction and not freed
  int64_t peak_bytes() const;   // most of that, since construction or reset_peak()
  int64_t allocations() const;  // how many, so far
  int64_t largest() const;      // bytes of the largest, so far
  void reset_peak();
};

}  // namespace tessera::testing
