#include "tessera/compile/detail/passes/pass_observer.h"

namespace tessera::compiler {
namespace {

thread_local PassObserver* innermost = nullptr;

}  // namespace

PassObserverScope::PassObserverScope(PassObserver* observer) : before_(innermost) { innermost = observer; }
PassObserverScope::~PassObserverScope() { innermost = before_; }
PassObserver* PassObserverScope::current() { return innermost; }

}  // namespace tessera::compiler
