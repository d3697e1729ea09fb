#pragma once
#include "tessera/base/error.h"

#include <atomic>
#include <thread>

namespace tessera::compiler {

// The thread that runs a program. A program has one memory for all its calls, so calls of two threads at the same time
// would compute with each other's values.
class OneCaller {
 public:
  // While alive, this thread calls. A nested call of the same thread is possible. UsageError if another thread calls.
  class Scope {
   public:
    explicit Scope(OneCaller& caller) : caller_(caller) {
      auto found = std::thread::id();
      outermost_ = caller.thread_.compare_exchange_strong(found, std::this_thread::get_id());
      TESSERA_CHECK(outermost_ || found == std::this_thread::get_id(), UsageError,
                    "compile: two threads call one compiled function, or a copy of it, at the same time, but its "
                    "program has one memory; call compile() once per thread");
    }
    ~Scope() {
      if (outermost_) caller_.thread_ = std::thread::id();
    }
    Scope(const Scope&) = delete;

   private:
    OneCaller& caller_;
    bool outermost_ = false;
  };

 private:
  std::atomic<std::thread::id> thread_ = std::thread::id();
};

}  // namespace tessera::compiler
