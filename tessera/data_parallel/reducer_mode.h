#pragma once
#include <cstdint>
#include <iosfwd>

namespace tessera {

// Who groups gradients into collectives. A setting for what is wrapped while it holds: PyTorch's optimize_ddp.
enum class ReducerMode : uint8_t {
  // The reducer, by buckets, in eager and compiled steps.
  Buckets,
  // One collective a parameter, for a compiler to group ("python_reducer"): in steps whose forward is compiled. If the
  // first forward is eager, the reducer takes over for good.
  PerParameter,
  // The same whether or not the forward is compiled ("python_reducer_without_compiled_forward").
  PerParameterAlways,
};
std::ostream& operator<<(std::ostream& out, ReducerMode mode);

// Sets the mode of what this thread wraps while alive.
// Example:  ReducerModeScope per_parameter(ReducerMode::PerParameter);  replicate(model);
class ReducerModeScope {
 public:
  explicit ReducerModeScope(ReducerMode mode);
  ~ReducerModeScope();
  ReducerModeScope(const ReducerModeScope&) = delete;
  static ReducerMode current();

 private:
  ReducerMode outer_;
};

}  // namespace tessera
