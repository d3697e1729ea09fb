#pragma once
#include "tessera/compile/detail/api/saved_step.h"
#include "tessera/compile/detail/api/traced_program.h"
#include "tessera/compile/detail/replay/one_caller.h"

#include <optional>
#include <set>
#include <vector>

namespace tessera::compiler {

// One program of a compiled step: an executable, the tensors it reads and writes, and the gradients it sets.
class StepProgram final : public TracedProgram {
 public:
  // Traces `function`, if necessary several times, and builds the executable.
  // `adds_to_gradients`: the function is a backward pass, which always adds to existing gradients.
  StepProgram(const CallArguments& arguments, const TracedFunction& function, const Settings& settings,
              bool adds_to_gradients = false);

  // What another process needs to run the program without tracing. UsageError if the program depends on more than a
  // file can contain.
  SavedStep save(const CallArguments& arguments, const Settings& settings) const;
  // The program of a saved step, for the tensors of this call. Creates optimizer state that it reads and that is
  // missing. Null if the call differs from the saved one; `why` gets the first difference.
  static std::shared_ptr<StepProgram> load(const SavedStep& saved, const CallArguments& arguments,
                                           const Settings& settings, std::string& why);

  Returned run(const CallArguments& arguments) override;
  SavedState save_before_run(const CallArguments& arguments) const override;

 private:
  StepProgram() = default;
  struct SetGradient {
    at::Tensor parameter, gradient;
    size_t storage_uses = 0;  // use count of the gradient's storage after a run, if only the program uses it
  };
  struct GradientGuard {
    at::Tensor parameter;
    TensorGuard gradient;
    bool holds() const { return gradient.holds(parameter.grad()); }
  };
  void record(TraceRun& run, const CallArguments& arguments, TraceRequest& request) override;
  TraceOutcome collect(TraceRun& run) override;
  void build(Tracer::Result traced, const TraceRun& run, const CallArguments& arguments,
             const Settings& settings) override;
  std::function<void()> keep_collected() override;
  bool more_guards_hold(const CallArguments& arguments, std::string* why) const override;
  Returned run_beside_eager(const CallArguments& arguments, const TracedFunction& function, bool exact) override;

  void collect_gradients(TraceRun& run, bool reads_old_gradients);
  void refresh_gradients();
  void detach_shared_gradients();
  void run_executable(const CallArguments& arguments);
  Tensors returned_tensors(const CallArguments& arguments) const;
  Tensors results_in_float32() const;
  CheckedTensors checked_tensors(const CallArguments& arguments, const Tensors& returned, bool of_program,
                                 bool exact) const;

  std::vector<SetGradient> gradients_;           // outputs of kind Gradient, in that order
  std::vector<SetGradient> external_gradients_;  // gradients in memory from outside, for example in a DDP bucket
  Tensors without_gradient_;                     // parameters whose .grad the step leaves undefined
  std::vector<GradientGuard> gradient_guards_;
  std::optional<Program> in_float32_;  // if the program rounds to bfloat16: without that, to judge its error
};

// The programs of one compiled step.
class StepCache {
 public:
  // Reads the file of CompileOptions::load. UsageError if it cannot be used here.
  explicit StepCache(Settings settings);
  // Returns the results of the step. The call that compiles also runs the program.
  CallResult call(CallArguments arguments, const TracedFunction& step);
  const StepProgram& last() const;  // the most recently used program; UsageError before the first call
  size_t size() const { return programs_.programs().size(); }
  const std::vector<std::string>& recompiles() const { return programs_.recompiles(); }
  bool has_program_for(CallArguments arguments) const;
  // Writes the cached program for these arguments into a file.
  void save(const std::string& path, CallArguments arguments) const;
  OneCaller& caller() { return caller_; }
  // For a call that cannot be compiled: UsageError, or with fullgraph = false one warning per reason.
  void refuse_or_warn(const std::string& reason);

 private:
  void before_compile(const CallArguments& arguments);

  std::shared_ptr<StepProgram> find_loaded(const CallArguments& arguments, std::string& why) const;

  Settings settings_;
  std::optional<SavedStep> loaded_;
  const void* partitioned_ = nullptr;  // the module whose parameters DataParallel has distributed
  FunctionCache<StepProgram> programs_;
  OneCaller caller_;
  std::set<std::string> refused_;  // reasons of which it has warned
};

}  // namespace tessera::compiler
