#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <vector>

namespace tessera {

// Hears what a step that is being compiled is about to do.
struct CompilingListener {
  virtual ~CompilingListener() = default;
  virtual void before_optimizer_step() {}
};

// While alive, this thread runs a step, or a forward, in order to compile it. Who has state on the host that a step
// changes says so:
//
//   add_guard   the program is for this state: found otherwise, it is compiled again
//   on_trace_end       the state is put back: the step was not meant
//   on_replay       ... but what it did to the state belongs to every run of the program
//
// All are of no effect while nothing is compiled.
class CompilingScope {
 public:
  enum class Of : uint8_t { Step, Part };  // all that is done between two states of a model, or not
  explicit CompilingScope(CompilingListener* hears = nullptr, Of of = Of::Part)
      : outer_(listener()), outer_of_(kind()) {
    if (depth()++ == 0) counter()++;
    listener() = hears;
    kind() = of;
  }
  ~CompilingScope();
  CompilingScope(const CompilingScope&) = delete;

  static void before_optimizer_step() {
    if (listener()) listener()->before_optimizer_step();
  }
  // A number that says which state it is, now and later.
  struct Guard {
    std::function<int64_t()> read;
    int64_t then = 0;
    bool holds() const { return read() == then; }
  };
  static void add_guard(std::function<int64_t()> read) {
    if (depth() == 0) return;
    const auto now = read();
    guards().push_back({std::move(read), now});
  }
  static std::vector<Guard> take_guards();  // for the compiler

  // Called once, the last that was added first: by finish(), or, where an error came before, with finished == false,
  // and then it must not throw.
  using AtEnd = std::function<void(bool finished)>;
  static void on_trace_end(AtEnd call) {
    if (depth() > 0) ends().push_back(std::move(call));
  }
  void finish();

  using Effect = std::function<void()>;
  static void on_replay(Effect effect) {
    if (depth() > 0) effects().push_back(std::move(effect));
  }
  static std::vector<Effect> take_effects();  // for the compiler

  // A leaf of the step whose gradient its owner takes on at once (it is a part of a flat parameter, say): nobody finds
  // one there between steps.
  static void add_inner_leaf(const void* leaf) {
    if (depth() > 0) inner_leaves().insert(leaf);
  }
  static bool is_inner_leaf(const void* leaf) { return inner_leaves().count(leaf) > 0; }

  static size_t serial() { return counter(); }  // of this thread's scopes, the outermost: how many there were
  static bool is_step() { return depth() > 0 && kind() == Of::Step; }

 private:
  friend bool compiling();
  static void end(bool finished);
  static int& depth();
  static size_t& counter();
  static CompilingListener*& listener();
  static Of& kind();
  static std::vector<Guard>& guards();
  static std::vector<AtEnd>& ends();
  static std::vector<Effect>& effects();
  static std::unordered_set<const void*>& inner_leaves();
  CompilingListener* outer_;
  Of outer_of_;
};
bool compiling();

}  // namespace tessera
