#pragma once
#include "tessera/compile/detail/api/program_cache.h"
#include "tessera/compile/detail/backward/backward_program.h"
#include "tessera/compile/detail/ir/split_forward_backward.h"
#include "tessera/compile/detail/replay/input_bindings.h"
#include "tessera/compile/detail/trace/trace_run.h"
#include "tessera/tracing/detail/compiling_scope.h"

#include <functional>
#include <memory>
#include <vector>

namespace tessera::compiler {

// The forward program of a compiled module and its backward program. Both are traced together and then split, as
// AOTAutograd does. A run of forward puts a CompiledNode into the autograd graph, which runs the backward program.
class ModuleProgram {
 public:
  // Traces `forward` and its backward.
  ModuleProgram(const CallArguments& arguments, const TracedFunction& forward, const Settings& settings);
  // Do all guards hold for this call?
  bool fits(const CallArguments& arguments, const ThreadState& now) const { return fits(arguments, now, nullptr); }
  // The first guard that does not hold.
  std::string why_not(const CallArguments& arguments, const ThreadState& now) const;
  void check_again_if_due(const CallArguments&, const TracedFunction&, const Settings&) {}
  // Copies the memory that a run writes, and the random state. The result restores it.
  std::function<void()> save_before_run(const CallArguments& arguments) const;
  Tensors run(const CallArguments& arguments);
  const std::vector<PassReport>& report() const { return report_; }  // of both programs, backward first
  ResultPrototype& prototype() { return prototype_; }
  const Executable& executable() const { return *executable_; }  // of forward

 private:
  struct Recorded {
    size_t forward_nodes = 0;  // nodes of the trace that belong to forward
    Tensors output_gradients;  // inputs of backward
    BackwardProgram backward;  // specs and types are filled in
  };
  Recorded record(TraceRun& run, const CallArguments& arguments, const TracedFunction& forward);
  void record_backward(Tracer& tracer, const CallArguments& arguments, const Tensors& roots,
                       const Tensors& root_gradients, BackwardProgram& backward);
  void build_backward(Recorded recorded, SplitProgram& split, const Tracer::Result& traced,
                      const CallArguments& arguments, const Settings& settings);
  void add_autograd_node(Tensors& returned, Tensors saved, const CallArguments& arguments) const;

  bool fits(const CallArguments& arguments, const ThreadState& now, std::string* why) const;

  Signature signature_;
  std::vector<CompilingScope::Guard> guards_;
  std::unique_ptr<Executable> executable_;  // of forward
  InputBindings bindings_, backward_bindings_;
  std::shared_ptr<BackwardProgram> backward_;     // null: no result requires a gradient
  std::vector<SpecRef> returned_specs_;           // null: a plain tensor
  std::vector<char> requires_grad_;               // of each result
  Tensors differentiated_parameters_;             // results of backward are their gradients, followed by
  std::vector<size_t> differentiated_arguments_;  // those of these tensor arguments
  std::vector<int32_t> saved_inputs_;             // buffers of parameters and arguments that backward reads
  RandomStateGuard::Advance stream_;              // of Tessera's random stream, on every run
  std::vector<PassReport> report_;
  ResultPrototype prototype_;
};

// The programs of one compiled module.
class ModuleCache {
 public:
  explicit ModuleCache(CompileOptions options) : options_(std::move(options)) {}
  // Returns the results of forward. The call that compiles also runs the program.
  CallResult call(const CallArguments& arguments, const TracedFunction& forward);
  size_t size() const { return programs_.programs().size(); }
  const std::vector<std::string>& recompiles() const { return programs_.recompiles(); }

 private:
  CompileOptions options_;
  FunctionCache<ModuleProgram> programs_;
};

}  // namespace tessera::compiler
