#include "tessera/compile/detail/passes/pass_observer.h"

namespace tessera::compiler {
namespace {

thread_local PassObserver* innermost_observer = nullptr;

}  // namespace

PassObserverScope::PassObserverScope(PassObserver* observer) : before_(innermost_observer) {
  innermost_observer = observer;
}
PassObserverScope::~PassObserverScope() { innermost_observer = before_; }
PassObserver* PassObserverScope::current() { return innermost_observer; }

}  // namespace tessera::compiler
