#pragma once
#include "tessera/testing/detail/counting_allocator.h"

#include <ATen/core/Tensor.h>

#include <functional>
#include <iosfwd>

// What a step of training takes of a process's memory, by phase, and what sharded training promises to take at most.
// In bytes.
namespace tessera::testing {

struct StepMemory {
  int64_t before = 0;                                // when the step begins: parameters and what the optimizer keeps
  int64_t after_forward = 0;                         // what backward is going to need, too
  int64_t after = 0;                                 // and the gradients
  int64_t forward = 0, backward = 0, optimizer = 0;  // the most that was live in each
  int64_t peak() const;
};

// Runs loss(), its backward and optimizer_step(). Gradients should have been reset.
StepMemory measure_step(CountingAllocator& count, const std::function<at::Tensor()>& loss,
                        const std::function<void()>& optimizer_step);

// The peak of a step, at most.
struct MemoryPromise {
  int64_t state = 0;        // this rank's part of parameters, gradients and optimizer state
  int64_t root = 0;         // the outermost unit, which is whole from forward to the end of backward
  int64_t gathered = 0;     // two units: the one that computes, and the next
  int64_t gradients = 0;    // of two units, whole: those being computed, and those on the wire
  int64_t activations = 0;  // of the plain model
  int64_t total() const { return state + root + gathered + gradients + activations; }
};
std::ostream& operator<<(std::ostream& out, const MemoryPromise& promise);  // in MB

// AdamW, float32.
struct UnitSizes {
  int64_t all = 0, root = 0, largest = 0;  // parameters: of the model, of the outermost unit, of the largest other one
};
MemoryPromise promise_of(const UnitSizes& sizes, int64_t ranks, int64_t activations);

}  // namespace tessera::testing
