#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <unordered_set>
#include <vector>

// The tracing protocol. compile() runs a train step once under a tracer (an OpMode, op_mode.h), which records the ops
// of the step as a program. Later calls replay the program; the C++ code of the step does not run again. So every
// component with host state that a step reads or changes (an optimizer, an FSDP unit, a gradient scaler) must take part
// in the tracing. The protocol, for one traced step:
//
//   1. compile() opens a CompilingScope on this thread. compiling() is true while it is open. Scopes nest; the
//      outermost one counts.
//   2. The step runs. Components call, in any order:
//        add_guard(read)       The program is valid only while read() gives its present value. If a guard fails before
//                              a later call, the step is traced again.
//        runtime_scalar(...)   A number, such as the learning rate, that each replay reads again (runtime_scalar.h).
//        on_trace_end(call)    Restores host state that the traced step changed. The traced step does not count as a
//                              step: its effects happen in the first replay.
//        on_replay(effect)     The effect of the step on host state. Each replay calls it after the program.
//        throw RestartTrace    After one-time setup that the trace must not contain (restart_trace.h).
//   3. compile() calls finish(): the on_trace_end callbacks run, the last added first. They can add on_replay effects.
//   4. compile() takes the guards and effects, and stores them with the program.
//
// If an error leaves the scope before finish(), the callbacks run with finished == false, and no program is stored.
// Outside a scope, add_guard, on_trace_end and on_replay do nothing.
//
//   // An optimizer whose step counter is host state:
//   CompilingScope::on_trace_end([this, before = steps_](bool) { steps_ = before; });
//   CompilingScope::on_replay([this] { steps_++; });
namespace tessera {

// Callbacks to the compiler during the traced step.
struct TraceObserver {
  virtual ~TraceObserver() = default;
  virtual void before_optimizer_step() {}
};

// While alive, this thread traces a train step, or a part of one, to compile it.
class CompilingScope {
 public:
  // What is traced: a full train step (forward, backward and optimizer), or a part of it (a module's forward).
  enum class Region : uint8_t { Step, Part };
  explicit CompilingScope(TraceObserver* observer = nullptr, Region region = Region::Part)
      : outer_(current_observer()), outer_region_(current_region()) {
    if (depth()++ == 0) counter()++;
    current_observer() = observer;
    current_region() = region;
  }
  ~CompilingScope();
  CompilingScope(const CompilingScope&) = delete;

  // Optimizers call it at the start of step().
  static void before_optimizer_step() {
    if (current_observer()) current_observer()->before_optimizer_step();
  }

  // A number that identifies host state: a counter, a flag, a hash. `traced` is its value during tracing.
  struct Guard {
    std::function<int64_t()> read;
    int64_t traced = 0;
    bool holds() const { return read() == traced; }
  };
  static void add_guard(std::function<int64_t()> read) {
    if (depth() == 0) return;
    const auto now = read();
    guards().push_back({std::move(read), now});
  }
  static std::vector<Guard> take_guards();  // for the compiler

  // Called once at the end of tracing, the last added first. `finished`: called by finish(). If false, an error is in
  // flight, and the callback must not throw.
  using TraceEndCallback = std::function<void(bool finished)>;
  static void on_trace_end(TraceEndCallback call) {
    if (depth() > 0) trace_end_callbacks().push_back(std::move(call));
  }
  void finish();

  using Effect = std::function<void()>;
  static void on_replay(Effect effect) {
    if (depth() > 0) effects().push_back(std::move(effect));
  }
  static std::vector<Effect> take_effects();  // for the compiler

  // Marks a leaf tensor whose gradient another component consumes at once, such as a view of a flat parameter. Its
  // .grad is not an output of the program.
  static void add_inner_leaf(const void* leaf) {
    if (depth() > 0) inner_leaves().insert(leaf);
  }
  static bool is_inner_leaf(const void* leaf) { return inner_leaves().count(leaf) > 0; }

  // Number of outermost scopes that this thread has opened. It identifies the current one.
  static size_t serial() { return counter(); }
  // True while a full train step is traced.
  static bool is_step() { return depth() > 0 && current_region() == Region::Step; }

 private:
  friend bool compiling();
  static void run_trace_end_callbacks(bool finished);
  static int& depth();
  static size_t& counter();
  static TraceObserver*& current_observer();
  static Region& current_region();
  static std::vector<Guard>& guards();
  static std::vector<TraceEndCallback>& trace_end_callbacks();
  static std::vector<Effect>& effects();
  static std::unordered_set<const void*>& inner_leaves();
  TraceObserver* outer_;
  Region outer_region_;
};

// True while this thread traces a step to compile it.
bool compiling();

}  // namespace tessera
