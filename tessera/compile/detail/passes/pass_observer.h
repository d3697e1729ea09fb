#pragma once
#include "tessera/compile/detail/passes/pass.h"

namespace tessera::compiler {

// Is called after each pass.
struct PassObserver {
  virtual ~PassObserver() = default;
  // The executable is built; the next thing is its first run.
  virtual void after_build() {}
  virtual void after_pass(const Program& program, const PassReport& report) = 0;
};

// While alive, run_passes calls `observer` after each pass on this thread. Scopes nest: only the innermost is called.
class PassObserverScope {
 public:
  explicit PassObserverScope(PassObserver* observer);
  ~PassObserverScope();
  PassObserverScope(const PassObserverScope&) = delete;
  static PassObserver* current();  // null: no scope is alive

 private:
  PassObserver* before_;
};

}  // namespace tessera::compiler
