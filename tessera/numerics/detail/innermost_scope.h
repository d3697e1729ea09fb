#pragma once
#include <memory>

namespace tessera::numerics {

// While alive, the Numerics::Invariant scope that is open on this thread is the innermost op mode. Open it inside of a
// tracer: the tracer then records the ops that the scope makes of others, and not the others. Without an open scope it
// does nothing.
class InnermostScope {
 public:
  InnermostScope();
  ~InnermostScope();
  InnermostScope(const InnermostScope&) = delete;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::numerics
