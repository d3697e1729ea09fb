#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

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
  // What is compiled depends on this number, a setting on the host: where it changes it is compiled again. Of no effect
  // while nothing is compiled.
  using Guard = std::function<int64_t()>;
  static void depends_on(Guard guard) {
    if (depth() > 0) guards().push_back(std::move(guard));
  }
  static std::vector<Guard> take_guards();  // for the compiler

  static size_t serial() { return counter(); }  // of this thread's scopes, the outermost: how many there were

 private:
  friend bool compiling();
  static int& depth();
  static size_t& counter();
  static CompilingListener*& listener();
  static std::vector<Guard>& guards();
  CompilingListener* outer_;
};
bool compiling();

}  // namespace tessera
