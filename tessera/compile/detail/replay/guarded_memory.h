#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera::compiler {

// The memory that a check of guards reads, in cache lines. A step replaces it in the caches of the processor by its own
// data. The check loads all lines at once before it starts; without that it would wait for one after the other.
// Memory that was freed meanwhile does no harm: loading it early never faults.
class GuardedMemory {
 public:
  void add(const void* begin, size_t bytes) {
    const auto first = reinterpret_cast<uintptr_t>(begin) / kLine, last = reinterpret_cast<uintptr_t>(begin) + bytes;
    for (auto line = first; line * kLine < last; line++) lines_.push_back(line);
  }
  // Call it after the last add().
  void finish() {
    std::sort(lines_.begin(), lines_.end());
    lines_.erase(std::unique(lines_.begin(), lines_.end()), lines_.end());
    lines_.shrink_to_fit();
  }
  void load_early() const {
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    for (const auto line : lines_) __builtin_prefetch(reinterpret_cast<const void*>(line * kLine));
  }

 private:
  static constexpr uintptr_t kLine = 64;
  std::vector<uintptr_t> lines_;
};

}  // namespace tessera::compiler
