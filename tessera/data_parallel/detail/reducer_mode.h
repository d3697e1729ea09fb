#pragma once
#include <cstdint>
#include <iosfwd>

namespace tessera {

// How gradients are grouped into all-reduces (PyTorch: torch._dynamo.config.optimize_ddp). The mode in force when a
// module is wrapped applies to it.
enum class ReducerMode : uint8_t {
  // The reducer makes buckets, in eager and in compiled steps.
  Buckets,
  // One all-reduce per parameter, which a compiler groups ("python_reducer"). For compiled forwards: if the first
  // forward is eager, the module uses buckets from then on.
  PerParameter,
  // The same for eager forwards too ("python_reducer_without_compiled_forward").
  PerParameterAlways,
};
// Prints PyTorch's name: python_reducer.
std::ostream& operator<<(std::ostream& out, ReducerMode mode);

// While alive, sets the mode of modules that this thread wraps.
// Example:  ReducerModeScope per_parameter(ReducerMode::PerParameter);  replicate(model);
class ReducerModeScope {
 public:
  // Sets the mode; the destructor restores the mode before.
  explicit ReducerModeScope(ReducerMode mode);
  ~ReducerModeScope();
  ReducerModeScope(const ReducerModeScope&) = delete;
  // The mode of this thread.
  static ReducerMode current();

 private:
  ReducerMode outer_;
};

}  // namespace tessera
