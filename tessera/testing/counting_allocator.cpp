#include "tessera/testing/counting_allocator.h"

#include "tessera/base/error.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <atomic>

namespace tessera::testing {
namespace {

std::atomic<int64_t> live{0}, peak{0}, count{0};
std::atomic<uint64_t> generation{0};  // odd while a CountingAllocator is alive

// What is handed out remembers its size, its generation and how to free it.
struct Block {
  c10::DataPtr data;
  int64_t bytes;
  uint64_t generation;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->generation == generation.load()) live -= block->bytes;
  delete block;
}

// Installed once and left in place: tensors may be freed through it at any later time.
struct Counting final : c10::Allocator {
  explicit Counting(c10::Allocator* below) : below(below) {}

  c10::DataPtr allocate(size_t n) override {
    const uint64_t now = generation.load();
    c10::DataPtr data = below->allocate(n);
    if (now % 2 == 0) return data;
    void* memory = data.get();
    auto* block = new Block{std::move(data), static_cast<int64_t>(n), now};
    count++;
    const int64_t total = live += block->bytes;
    for (int64_t known = peak; total > known && !peak.compare_exchange_weak(known, total);) {
    }
    return {memory, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
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
  live = peak = count = 0;
  generation++;
}
CountingAllocator::~CountingAllocator() { generation++; }

int64_t CountingAllocator::live_bytes() const { return live; }
int64_t CountingAllocator::peak_bytes() const { return peak; }
int64_t CountingAllocator::allocations() const { return count; }
void CountingAllocator::reset_peak() { peak = live.load(); }

}  // namespace tessera::testing
