#pragma once
#include "tessera/compile/detail/api/program_cache.h"
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

// One program of a compiled step: an executable, the tensors it reads and writes, and the gradients it sets.
class StepProgram {
 public:
  // Traces `function`, if necessary several times, and builds the executable.
  // `adds_to_gradients`: the function is a backward pass, which always adds to existing gradients.
  StepProgram(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
              bool adds_to_gradients = false);

  // Do all guards hold for this call?
  bool fits(const CallArguments& arguments, const ThreadState& now) const { return fits(arguments, now, nullptr); }
  // The first guard that does not hold.
  std::string why_not(const CallArguments& arguments, const ThreadState& now) const;
  // Traces the function again on calls 2, 4, 8, ... of this program if it can read what no guard sees: captured
  // variables, members of submodules. UsageError with the first op that differs.
  void check_again_if_due(const CallArguments& arguments, const TracedFunction& function, const Settings& settings);
  Tensors run(const CallArguments& arguments);
  // Copies everything that a run can change. The result restores it.
  std::function<void()> save_before_run(const CallArguments& arguments) const;
  const Executable& executable() const { return *executable_; }
  const std::vector<PassReport>& report() const { return report_; }  // of every pass that ran, with its time
  ResultPrototype& prototype() { return prototype_; }

 private:
  struct SetGradient {
    at::Tensor parameter, gradient;
    size_t storage_uses = 0;  // use count of the gradient's storage after a run, if only the program uses it
  };
  struct GradientGuard {
    at::Tensor parameter;
    std::optional<Type> gradient;  // at tracing; none: undefined
    bool holds() const;
  };
  // A tensor or a module that the step uses although it is not among its arguments.
  struct CapturedTensor {
    at::Tensor tensor;
    TensorGuard guard;
    size_t uses = 0;  // use count after tracing; fewer: its variable has another tensor now
  };
  struct CapturedModule {
    std::weak_ptr<torch::nn::Module> module;
    ModuleGuard guard;
  };
  enum class TraceOutcome : uint8_t {
    Done,
    ReadsOldGradients,  // trace again without gradient placeholders
    FoundLeaves,        // trace again with the captured leaves as inputs
    FoundLiveNumbers,   // find out what they are used for, and trace again
    NumbersDiffer,      // number by number, find out what they are used for, and trace again
    Restarted,          // one-time setup ran while tracing: trace again
    Unconfirmed,        // trace again: the second trace must give the same program
  };
  // Two traces with marks in place of numbers (tracing/detail/number_input.h).
  struct NumberTraces {
    int only = -1;  // the number with a mark; -1: all
    TraceText positive, negative;
  };
  // Which numbers of a trace are marks.
  struct MarkedNumbers {
    bool negative = false;
    int only = -1;
  };
  // How one trace runs.
  struct TraceRequest {
    const std::function<Tensors()>& step;
    const Settings& settings;
    CompilingScope::Region scope;
    TraceText* text_only = nullptr;  // if given, gets the trace, and no executable is built
    std::optional<MarkedNumbers> marks = {};
    bool host_has_read = false;  // of a trace with marks: the host has read one
  };
  TraceOutcome trace_until_settled(const CallArguments& arguments, TraceRequest& request);
  TraceOutcome trace(const CallArguments& given, TraceRequest& request);
  bool record(TraceRun& run, const CallArguments& arguments, TraceRequest& request);
  bool collect_captured_leaves(TraceRun& run, const Settings& settings);
  void collect_gradients(TraceRun& run, bool reads_old_gradients);
  void find_number_inputs(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
                          CompilingScope::Region scope, bool one_by_one);
  bool mark_number_inputs(Program& program, const CallArguments& arguments);
  void build(Tracer::Result traced, const TraceRun& run, const CallArguments& arguments, const Settings& settings);
  TraceText trace_for_check(const CallArguments& arguments, const TracedFunction& function, const Settings& settings);
  void guard_captures(const CallArguments& arguments);
  bool fits(const CallArguments& arguments, const ThreadState& now, std::string* why) const;
  void refresh_gradients();
  void detach_shared_gradients();
  std::vector<double> numbers_of(const CallArguments& arguments) const;

  Signature signature_;
  bool gradient_placeholders_ = false;
  Tensors captured_;  // leaves that the step uses although they are not among its arguments
  std::vector<CapturedTensor> captured_tensors_;
  std::vector<CapturedModule> captured_modules_;
  std::vector<const torch::nn::Module*> reached_modules_;  // whose forward ran while tracing
  std::vector<const double*> live_;                        // numbers behind ts::live()
  std::vector<NumberTraces> number_traces_;                // while compiling
  std::vector<NumberUse> number_uses_;
  std::vector<bool> number_is_key_;                                                               // of the call
  std::shared_ptr<std::vector<double>> number_values_ = std::make_shared<std::vector<double>>();  // read by runs
  TraceText traced_text_;
  bool check_again_ = false, reads_live_ = false;
  int64_t calls_ = 0;
  std::unique_ptr<Executable> executable_;
  InputBindings bindings_;
  std::vector<int32_t> written_buffers_;         // external buffers that the program writes
  std::vector<SetGradient> gradients_;           // outputs of kind Gradient, in that order
  std::vector<SetGradient> external_gradients_;  // gradients in memory from outside, for example in a DDP bucket
  Tensors without_gradient_;                     // parameters whose .grad the step leaves undefined
  std::vector<GradientGuard> gradient_guards_;
  std::vector<SpecRef> returned_specs_;  // null: a plain tensor
  std::vector<CompilingScope::Guard> guards_;
  std::vector<CompilingScope::Effect> on_replay_;  // changes to host state, repeated on every run
  RandomStateGuard::Advance stream_;               // of Tessera's random stream, on every run
  RepeatedTraces traces_;
  std::vector<PassReport> report_;
  ResultPrototype prototype_;
};

// The programs of one compiled step.
class StepCache {
 public:
  explicit StepCache(Settings settings) : settings_(std::move(settings)) {}
  // Returns the results of the step. The call that compiles also runs the program.
  CallResult call(CallArguments arguments, const TracedFunction& step);
  const StepProgram& last() const;  // the most recently used program; UsageError before the first call
  size_t size() const { return programs_.programs().size(); }
  const std::vector<std::string>& recompiles() const { return programs_.recompiles(); }
  bool has_program_for(CallArguments arguments) const;

 private:
  void before_compile(const CallArguments& arguments);

  Settings settings_;
  const void* partitioned_ = nullptr;  // the module whose parameters DataParallel has distributed
  FunctionCache<StepProgram> programs_;
};

}  // namespace tessera::compiler
