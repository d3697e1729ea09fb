#pragma once
#include "tessera/testing/detail/counting_allocator.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <iosfwd>

// The memory of a training step by phase, and the upper bound for sharded training. All values are in bytes.
namespace tessera::testing {

struct StepMemory {
  int64_t before = 0;                                // at the start of the step: parameters and optimizer state
  int64_t after_forward = 0;                         // plus what autograd saved for backward
  int64_t after = 0;                                 // at the end: parameters, optimizer state, gradients
  int64_t forward = 0, backward = 0, optimizer = 0;  // the peak of each phase
  int64_t peak() const;
};

// Runs loss(), its backward and optimizer_step(). Requires: gradients are undefined.
StepMemory measure_step(CountingAllocator& count, const std::function<at::Tensor()>& loss,
                        const std::function<void()>& optimizer_step);

// The upper bound of the peak of a step with FSDP.
struct MemoryBound {
  int64_t state = 0;        // this rank's shards of parameters, gradients and optimizer state
  int64_t root = 0;         // the root unit, which is unsharded from forward to the end of backward
  int64_t gathered = 0;     // two unsharded units: the one that computes and the prefetched one
  int64_t gradients = 0;    // unsharded gradients of two units: one in computation, one in reduction
  int64_t activations = 0;  // of the plain model
  int64_t total() const { return state + root + gathered + gradients + activations; }
};
std::ostream& operator<<(std::ostream& out, const MemoryBound& bound);  // in MB

// Numbers of parameters: of the model, of the root unit, of the largest other unit.
struct UnitSizes {
  int64_t all = 0, root = 0, largest = 0;
};
// The bound for AdamW and float32.
MemoryBound memory_bound(const UnitSizes& sizes, int64_t ranks, int64_t activations);

}  // namespace tessera::testing
