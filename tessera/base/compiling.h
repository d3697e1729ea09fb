#pragma once
#include <cstddef>

namespace tessera {

// Hears what a step that is being compiled is about to do.
struct CompilingListener {
  virtual ~CompilingListener() = default;
  virtual void before_optimizer_step() {}
};

// While alive, this thread runs a step, or a forward, in order to compile it.
class CompilingScope {
 public:
  explicit CompilingScope(CompilingListener* hears = nullptr) : outer_(listener()) {
    if (depth()++ == 0) counter()++;
    listener() = hears;
  }
  ~CompilingScope() {
    depth()--;
    listener() = outer_;
  }
  CompilingScope(const CompilingScope&) = delete;

  static void before_optimizer_step() {
    if (listener()) listener()->before_optimizer_step();
  }

  static size_t serial() { return counter(); }  // of this thread's scopes, the outermost: how many there were

 private:
  friend bool compiling();
  static int& depth();
  static size_t& counter();
  static CompilingListener*& listener();
  CompilingListener* outer_;
};
bool compiling();

}  // namespace tessera
