#pragma once
#include <locale>
#include <mutex>

namespace tessera::compiler {

// While alive, streams that are created write 1234.5 as C++ source code does, whatever std::locale::global() the
// program has set: kernels, keys of caches and the text of programs contain numbers. The locale belongs to the process,
// so the first scope sets it and the last one restores it.
class ClassicLocaleScope {
 public:
  ClassicLocaleScope() {
    const std::lock_guard lock(state().mutex);
    if (state().scopes++ == 0) state().before = std::locale::global(std::locale::classic());
  }
  ~ClassicLocaleScope() {
    const std::lock_guard lock(state().mutex);
    if (--state().scopes == 0) std::locale::global(state().before);
  }
  ClassicLocaleScope(const ClassicLocaleScope&) = delete;

 private:
  struct State {
    std::mutex mutex;
    int scopes = 0;
    std::locale before;
  };
  static State& state() {
    static State it;
    return it;
  }
};

}  // namespace tessera::compiler
