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
  // What is compiled depends on this number, a setting on the host: where it is another than now it is compiled again.
  // Of no effect while nothing is compiled.
  struct Guard {
    std::function<int64_t()> read;
    int64_t then = 0;
    bool holds() const { return read() == then; }
  };
  static void depends_on(std::function<int64_t()> read) {
    if (depth() == 0) return;
    const auto now = read();
    guards().push_back({std::move(read), now});
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
