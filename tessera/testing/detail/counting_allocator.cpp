#include "tessera/testing/detail/counting_allocator.h"

#include "tessera/base/error.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace tessera::testing {
namespace {

std::atomic<int64_t> live{0}, peak{0}, count{0}, largest_one{0};
std::atomic<uint64_t> generation{0};  // odd while a CountingAllocator is alive

void raise(std::atomic<int64_t>& most, int64_t to) {
  for (int64_t known = most; to > known && !most.compare_exchange_weak(known, to);) {
  }
}

// What is handed out while counting, by address: the context of a block must be its address, because LibTorch also
// takes memory raw (oneDNN's kernels do) and then has nothing else to give back.
struct Block {
  int64_t bytes;
  uint64_t generation;
};
std::mutex mutex;
std::unordered_map<void*, Block>& blocks() {
  static auto* map = new std::unordered_map<void*, Block>;
  return *map;
}
c10::DeleterFnPtr free_below = nullptr;

void free_block(void* memory) {
  {
    std::lock_guard lock(mutex);
    if (const auto found = blocks().find(memory); found != blocks().end()) {
      if (found->second.generation == generation.load()) live -= found->second.bytes;
      blocks().erase(found);
    }
  }
  free_below(memory);
}

// Installed once and left in place: tensors may be freed through it at any later time.
struct Counting final : c10::Allocator {
  explicit Counting(c10::Allocator* below) : below(below) {
    TESSERA_CHECK(below->raw_deleter(), InternalError, "the CPU allocator that is installed hands out no raw memory");
    free_below = below->raw_deleter();
  }

  c10::DataPtr allocate(size_t n) override {
    const uint64_t now = generation.load();
    void* memory = below->raw_allocate(n);
    if (now % 2 == 1 && memory) {
      const auto bytes = static_cast<int64_t>(n);
      {
        std::lock_guard lock(mutex);
        blocks()[memory] = {bytes, now};
      }
      count++;
      raise(peak, live += bytes);
      raise(largest_one, bytes);
    }
    return {memory, memory, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { below->copy_data(to, from, n); }

  c10::Allocator* below;
};

}  // namespace

CountingAllocator::CountingAllocator() {
  TESSERA_CHECK(generation % 2 == 0, UsageError, "two CountingAllocators at a time");
  static Counting* installed = [] {
    auto* it = new Counting(c10::GetAllocator(c10::DeviceType::CPU));
    c10::SetAllocator(c10::DeviceType::CPU, it, /*priority=*/100);
    return it;
  }();
  (void)installed;
  live = peak = count = largest_one = 0;
  generation++;
}
CountingAllocator::~CountingAllocator() { generation++; }

int64_t CountingAllocator::live_bytes() const { return live; }
int64_t CountingAllocator::peak_bytes() const { return peak; }
int64_t CountingAllocator::allocations() const { return count; }
int64_t CountingAllocator::largest() const { return largest_one; }
void CountingAllocator::reset_peak() { peak = live.load(); }

}  // namespace tessera::testing
