#include "tessera/testing/detail/step_memory.h"

#include <algorithm>
#include <iomanip>
#include <ostream>

namespace tessera::testing {

int64_t StepMemory::peak() const { return std::max({forward, backward, optimizer}); }

StepMemory measure_step(CountingAllocator& count, const std::function<at::Tensor()>& loss,
                        const std::function<void()>& optimizer_step) {
  const auto peak_of = [&](const auto& phase) {
    count.reset_peak();
    phase();
    return count.peak_bytes();
  };
  StepMemory found;
  found.before = count.live_bytes();
  {
    at::Tensor value;
    found.forward = peak_of([&] { value = loss(); });
    found.after_forward = count.live_bytes();
    found.backward = peak_of([&] { value.backward(); });
  }
  found.optimizer = peak_of(optimizer_step);
  found.after = count.live_bytes();
  return found;
}

MemoryBound memory_bound(const UnitSizes& sizes, int64_t ranks, int64_t activations) {
  constexpr int64_t kFloat = 4, kCopies = 4;  // parameter, gradient, two moments
  return {.state = kCopies * kFloat * sizes.all / ranks,
          .root = kFloat * sizes.root,
          .gathered = 2 * kFloat * sizes.largest,
          .gradients = 2 * kFloat * sizes.largest,
          .activations = activations};
}

std::ostream& operator<<(std::ostream& out, const MemoryBound& p) {
  const auto mb = [](int64_t bytes) { return static_cast<double>(bytes) * 1e-6; };
  return out << std::fixed << std::setprecision(1) << mb(p.total()) << " = state " << mb(p.state) << " + root "
             << mb(p.root) << " + gathered " << mb(p.gathered) << " + gradients " << mb(p.gradients)
             << " + activations " << mb(p.activations);
}

}  // namespace tessera::testing
