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

void raise_to(std::atomic<int64_t>& maximum, int64_t value) {
  for (int64_t known = maximum; value > known && !maximum.compare_exchange_weak(known, value);) {
  }
}

// The counted blocks, by address. The context of a block must be its address: oneDNN's kernels use raw_allocate(), and
// LibTorch then has only the address to free.
struct Block {
  int64_t bytes;
  uint64_t generation;
};
std::mutex mutex;
std::unordered_map<void*, Block>& blocks() {
  static auto* map = new std::unordered_map<void*, Block>;
  return *map;
}
c10::DeleterFnPtr free_underlying = nullptr;

void free_block(void* memory) {
  {
    std::lock_guard lock(mutex);
    if (const auto found = blocks().find(memory); found != blocks().end()) {
      if (found->second.generation == generation.load()) live -= found->second.bytes;
      blocks().erase(found);
    }
  }
  free_underlying(memory);
}

// Installed once and never removed, because tensors may be freed through it at any later time.
struct CountingImpl final : c10::Allocator {
  explicit CountingImpl(c10::Allocator* underlying) : underlying(underlying) {
    TESSERA_CHECK(underlying->raw_deleter(), InternalError, "the CPU allocator does not support raw allocations");
    free_underlying = underlying->raw_deleter();
  }

  c10::DataPtr allocate(size_t n) override {
    const uint64_t now = generation.load();
    void* memory = underlying->raw_allocate(n);
    if (now % 2 == 1 && memory) {
      const auto bytes = static_cast<int64_t>(n);
      {
        std::lock_guard lock(mutex);
        blocks()[memory] = {bytes, now};
      }
      count++;
      raise_to(peak, live += bytes);
      raise_to(largest_one, bytes);
    }
    return {memory, memory, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t n) const override { underlying->copy_data(to, from, n); }

  c10::Allocator* underlying;
};

}  // namespace

CountingAllocator::CountingAllocator() {
  TESSERA_CHECK(generation % 2 == 0, UsageError, "a CountingAllocator is already alive; only one is allowed at a time");
  static CountingImpl* installed = [] {
    auto* it = new CountingImpl(c10::GetAllocator(c10::DeviceType::CPU));
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
