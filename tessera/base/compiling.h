#pragma once
#include <cstddef>

namespace tessera {

// While alive, this thread runs a step, or a forward, in order to compile it.
class CompilingScope {
 public:
  CompilingScope() {
    if (depth()++ == 0) counter()++;
  }
  ~CompilingScope() { depth()--; }
  CompilingScope(const CompilingScope&) = delete;

  static size_t serial() { return counter(); }  // of this thread's scopes, the outermost: how many there were

 private:
  friend bool compiling();
  static int& depth();
  static size_t& counter();
};
bool compiling();

}  // namespace tessera
