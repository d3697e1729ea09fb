#pragma once
#include "tessera/compile/detail/api/program_cache.h"
#include "tessera/compile/detail/api/returned_tensors.h"
#include "tessera/compile/detail/api/saved_state.h"
#include "tessera/compile/detail/api/trace_text.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/replay/input_bindings.h"
#include "tessera/compile/detail/trace/repeated_traces.h"
#include "tessera/compile/detail/trace/trace_run.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

struct SavedStep;

// What the programs of steps and of modules have in common: a function is traced until its inputs are known, guards are
// made of what the traces have read, and some calls are checked against eager mode. Derived classes record one run of
// the function, and build executables.
class TracedProgram {
 public:
  virtual ~TracedProgram() = default;
  TracedProgram(const TracedProgram&) = delete;

  // Do all guards hold for this call?
  bool fits(const CallArguments& arguments, const ThreadState& now) const;
  // The same. Afterwards checks are faster, until something changes.
  bool fits_and_remember(const CallArguments& arguments, const ThreadState& now);
  // The first guard that does not hold.
  std::string why_not(const CallArguments& arguments, const ThreadState& now) const;

  virtual Returned run(const CallArguments& arguments) = 0;
  // On calls 2, 4, 8, ... traces the function again: it can read what no guard sees, such as a global variable. If it
  // has captured variables, or members of modules that no guard sees, calls 1, 2, 4, 8, ... also run it in eager mode
  // and compiled from the same state. Returns what the call returns, or nothing if this call is not checked. UsageError
  // with the first difference.
  std::optional<Returned> check_if_due(const CallArguments& arguments, const TracedFunction& function,
                                       const Settings& settings);
  // Saves everything that a run can change.
  virtual SavedState save_before_run(const CallArguments& arguments) const;

  const Executable& executable() const { return *executable_; }
  const std::vector<PassReport>& report() const { return report_; }  // of every pass that ran, with its time
  ResultPrototype& prototype() { return prototype_; }

 protected:
  enum class TraceOutcome : uint8_t {
    Done,
    ReadsOldGradients,  // trace again without gradient placeholders
    FoundLeaves,        // trace again with the captured leaves as inputs
    FoundLiveNumbers,   // find out what they are used for, and trace again
    NumbersDiffer,      // number by number, find out what they are used for, and trace again
    Restarted,          // one-time setup ran while tracing: trace again
    Unconfirmed,        // trace again: the second trace must give the same program
  };
  // Which numbers of a trace are marks.
  struct MarkedNumbers {
    bool negative = false;
    int only = -1;
  };
  // How one trace runs.
  struct TraceRequest {
    const std::function<Tensors()>& function;
    const Settings& settings;
    TraceText* text_only = nullptr;  // if given, gets the trace, and no executable is built
    std::optional<MarkedNumbers> marks = {};
    bool host_has_read = false;  // of a trace with marks: the host has read one
  };
  // A tensor of a checked call, in eager mode or compiled.
  struct CheckedTensor {
    std::string name;
    at::Tensor value;     // undefined: none
    int32_t buffer = -1;  // of the program
  };
  using CheckedTensors = std::vector<CheckedTensor>;

  TracedProgram() = default;
  // Traces `function`, if necessary several times, and builds the executables. Call it in the constructor.
  // `confirmed`: two traces from one state must be equal, and numbers can be inputs. Not for a backward pass.
  void compile(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
               CompilingScope::Region region, bool confirmed);

  // Runs the function by call_function(), under the tracer, and adds its results as outputs.
  virtual void record(TraceRun& run, const CallArguments& arguments, TraceRequest& request) = 0;
  // After a complete trace: collects what the function has left behind.
  virtual TraceOutcome collect(TraceRun& /*run*/) { return TraceOutcome::Done; }
  virtual void build(Tracer::Result traced, const TraceRun& run, const CallArguments& arguments,
                     const Settings& settings) = 0;
  // A trace for a check overwrites what traces collect. The result restores it.
  virtual std::function<void()> keep_collected();
  virtual bool more_guards_hold(const CallArguments& arguments, std::string* why) const = 0;
  // Runs the function in eager mode and compiled, both from the present state. Returns the results of the call.
  virtual Returned run_beside_eager(const CallArguments& arguments, const TracedFunction& function, bool exact) = 0;

  Tensors call_function(TraceRun& run, TraceRequest& request);
  void find_written_buffers(const Program& program);
  // In save_step_program.cpp. load_trace() sets what reads the numbers of the program.
  SavedStep save_trace(const CallArguments& arguments) const;
  void load_trace(const SavedStep& saved, Program& program, const CallArguments& arguments);
  void finish_loading(const CallArguments& arguments, const Settings& settings);
  // What a run has written into memory of the caller, without gradients.
  CheckedTensors written_memory(const CallArguments& arguments) const;
  // UsageError with the first tensor that differs. `state`: a sentence that says which state an error leaves.
  // in_float32: what the first tensors are without roundings to bfloat16.
  void compare_with_eager(const CheckedTensors& compiled, const CheckedTensors& eager, bool exact, const char* state,
                          const Tensors& in_float32 = {}) const;
  std::vector<double> numbers_of(const CallArguments& arguments) const;
  // Numbers of the call, for runs; numbers of the result.
  void set_numbers(const CallArguments& arguments) { *number_values_ = numbers_of(arguments); }
  std::vector<double> returned_numbers() const;
  // After a run of host code: excludes members of modules that it has changed itself from the guards.
  void exclude_changed_members();

  CompilingScope::Region region_ = CompilingScope::Region::Part;
  Tensors captured_;  // leaves that the function uses although they are not among its arguments
  std::shared_ptr<std::vector<double>> number_values_ = std::make_shared<std::vector<double>>();  // read by runs
  std::unique_ptr<Executable> executable_;
  InputBindings bindings_;
  ReturnedTensors returned_;
  std::vector<CompilingScope::Effect> on_replay_;  // changes to host state, repeated on every run
  RandomStateGuard::Advance stream_;               // of Tessera's random stream, on every run
  std::vector<PassReport> report_;
  bool gradient_placeholders_ = false;

 private:
  // A tensor or a module that the function uses although it is not among its arguments.
  struct CapturedTensor {
    at::Tensor tensor;
    TensorGuard guard;
    size_t uses = 0;  // use count after tracing; fewer: its variable has another tensor now
  };
  struct CapturedModule {
    std::weak_ptr<torch::nn::Module> module;
    ModuleGuard guard;
  };
  // Two traces with marks in place of numbers (tracing/detail/number_input.h).
  struct NumberTraces {
    int only = -1;  // the number with a mark; -1: all
    TraceText positive, negative;
  };
  TraceOutcome trace_until_settled(const CallArguments& arguments, TraceRequest& request);
  TraceOutcome trace(const CallArguments& given, TraceRequest& request);
  bool record_or_restart(TraceRun& run, const CallArguments& arguments, TraceRequest& request);
  bool collect_captured_leaves(TraceRun& run, const CallArguments& arguments, const Settings& settings);
  void find_number_inputs(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
                          bool one_by_one);
  bool mark_number_inputs(Program& program, const CallArguments& arguments);
  void note_captured_tensors(const Tracer::Result& traced);
  void guard_captures(const CallArguments& arguments);
  bool fits(const CallArguments& arguments, const ThreadState& now, std::string* why, bool state_holds) const;
  bool state_is_unchanged(const CallArguments& arguments) const;
  std::string difference_of_trace(const CallArguments& arguments, const TracedFunction& function,
                                  const Settings& settings);
  bool can_run_beside_eager(const Settings& settings) const;
  bool is_exact(const Settings& settings) const;
  Tensors call_and_keep_numbers(const TracedFunction& function, const std::vector<double>* numbers);

  Signature signature_;
  GuardSnapshot snapshot_;  // of the state of modules, parameters and captured tensors when all guards held last
  std::vector<CapturedTensor> captured_tensors_;
  std::vector<CapturedModule> captured_modules_;
  std::vector<const torch::nn::Module*> reached_modules_;  // whose forward ran while tracing
  std::vector<const double*> live_;                        // numbers behind ts::live()
  std::vector<NumberTraces> number_traces_;                // while compiling
  std::vector<NumberUse> number_uses_;
  std::vector<NumberUse> returned_number_uses_;  // `argument`: the index among the numbers of the result
  std::vector<bool> number_is_key_;              // of the call
  ResultLeaves leaves_;                          // of the last trace
  std::vector<double> returned_numbers_;         // of the trace that was compiled
  TraceText traced_text_;
  bool confirmed_ = true, check_again_ = false, reads_live_ = false;
  bool is_loaded_ = false;    // from a file: the function has not run in this process
  bool check_values_ = true;  // in checks, run it in eager mode too
  int64_t calls_ = 0;
  std::vector<int32_t> written_buffers_;  // external buffers that the program writes
  std::vector<CompilingScope::Guard> guards_;
  std::vector<at::Generator> generators_;  // that the function can draw from; empty: it does not draw
  RepeatedTraces traces_;
  ResultPrototype prototype_;
};

}  // namespace tessera::compiler
