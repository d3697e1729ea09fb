#pragma once
#include "tessera/compile/detail/api/program_cache.h"
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
  // Traces `step`, if necessary several times, and builds the executable. `step` returns its result tensors.
  // `adds_to_gradients`: the function is a backward pass, which always adds to existing gradients.
  StepProgram(const CallArguments& arguments, const std::function<Tensors()>& step, const Settings& settings,
              bool adds_to_gradients = false);

  // Do all guards hold for this call?
  bool fits(const CallArguments& arguments, const CacheKey& key) const;
  Tensors run(const CallArguments& arguments);
  const CacheKey& key() const { return key_; }
  const Executable& executable() const { return *executable_; }
  const std::vector<PassReport>& report() const { return report_; }  // of every pass that ran, with its time

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
  enum class TraceOutcome : uint8_t {
    Done,
    ReadsOldGradients,  // trace again without gradient placeholders
    FoundLeaves,        // trace again with the captured leaves as inputs
    Restarted,          // one-time setup ran while tracing: trace again
    Unconfirmed,        // trace again: the second trace must give the same program
  };
  TraceOutcome trace(const CallArguments& given, const std::function<Tensors()>& step, const Settings& settings,
                     CompilingScope::Region scope, bool gradient_placeholders);
  bool record(TraceRun& run, const CallArguments& arguments, const std::function<Tensors()>& step,
              const Settings& settings, CompilingScope::Region scope);
  bool collect_captured_leaves(TraceRun& run, const Settings& settings);
  void collect_gradients(TraceRun& run, bool reads_old_gradients);
  void build(Tracer::Result traced, const TraceRun& run, const CallArguments& arguments, const Settings& settings);
  void refresh_gradients();
  void detach_shared_gradients();

  CacheKey key_;
  Tensors captured_;  // leaves that the step uses although they are not among its arguments
  std::unique_ptr<Executable> executable_;
  InputBindings bindings_;
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
};

// The programs of one compiled step.
class StepCache {
 public:
  explicit StepCache(Settings settings) : settings_(std::move(settings)) {}
  // Returns the results of the step. The call that compiles also runs the program.
  Tensors call(CallArguments arguments, const std::function<Tensors()>& step);
  const StepProgram& last() const;  // the most recently used program; UsageError before the first call
  size_t size() const { return programs_.programs().size(); }

 private:
  void before_compile(const CallArguments& arguments, const CacheKey& key);

  Settings settings_;
  const void* partitioned_ = nullptr;  // the module whose parameters DataParallel has distributed
  FunctionCache<StepProgram> programs_;
  bool warned_of_recompile_ = false;
};

}  // namespace tessera::compiler
