#pragma once
#include "tessera/compile/detail/passes/pass.h"

namespace tessera::compiler {

struct PassObserver {
  virtual ~PassObserver() = default;
  virtual void after_pass(const Program& program, const PassReport& report) = 0;
};

// While alive, `observer` sees every pass that run_passes runs on this thread. Scopes nest; the innermost sees it.
class PassObserverScope {
 public:
  explicit PassObserverScope(PassObserver* observer);
  ~PassObserverScope();
  PassObserverScope(const PassObserverScope&) = delete;
  static PassObserver* current();  // null: nobody looks

 private:
  PassObserver* before_;
};

}  // namespace tessera::compiler
