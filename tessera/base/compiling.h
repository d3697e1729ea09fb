#pragma once

namespace tessera {

// While alive, this thread runs a step, or a forward, in order to compile it.
class CompilingScope {
 public:
  CompilingScope() { depth()++; }
  ~CompilingScope() { depth()--; }
  CompilingScope(const CompilingScope&) = delete;

 private:
  friend bool compiling();
  static int& depth();
};
bool compiling();

}  // namespace tessera
