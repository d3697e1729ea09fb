#pragma once
#include "tessera/compile/detail/api/traced_program.h"
#include "tessera/compile/detail/backward/backward_program.h"
#include "tessera/compile/detail/ir/split_forward_backward.h"
#include "tessera/compile/detail/replay/one_caller.h"

#include <memory>
#include <vector>

namespace tessera::compiler {

// The forward program of a compiled module and its backward program. Both are traced together and then split, as
// AOTAutograd does. A run of forward puts a CompiledNode into the autograd graph, which runs the backward program.
class ModuleProgram final : public TracedProgram {
 public:
  // Traces `forward` and its backward.
  ModuleProgram(const CallArguments& arguments, const TracedFunction& forward, const Settings& settings);
  Returned run(const CallArguments& arguments) override;

 private:
  // What one trace of forward and backward has found.
  struct Recorded {
    size_t forward_nodes = 0;                      // nodes of the trace that belong to forward
    Tensors output_gradients;                      // inputs of backward
    std::vector<SpecRef> gradient_specs;           // of these; null: a plain tensor
    std::vector<Type> gradient_types;              // of these
    Tensors differentiated_parameters;             // results of backward are their gradients, followed by
    std::vector<size_t> differentiated_arguments;  // those of these tensor arguments
    std::vector<SpecRef> result_specs;             // of the results of backward
  };
  void record(TraceRun& run, const CallArguments& arguments, TraceRequest& request) override;
  void build(Tracer::Result traced, const TraceRun& run, const CallArguments& arguments,
             const Settings& settings) override;
  std::function<void()> keep_collected() override;
  bool more_guards_hold(const CallArguments& arguments, std::string* why) const override;
  Returned run_beside_eager(const CallArguments& arguments, const TracedFunction& function, bool exact) override;

  void record_backward(Tracer& tracer, const CallArguments& arguments, const Tensors& roots,
                       const Tensors& root_gradients);
  void build_backward(SplitProgram& split, const Tracer::Result& traced, const CallArguments& arguments,
                      const Settings& settings);
  Program split_off_weights(Program& program, BackwardProgram& backward, const Settings& settings) const;
  void add_autograd_node(Tensors& returned, Tensors saved, const CallArguments& arguments) const;
  Tensors differentiated(const CallArguments& arguments) const;
  CheckedTensors checked_tensors(const CallArguments& arguments, const Tensors& returned, bool exact) const;

  Recorded recorded_;
  InputBindings backward_bindings_;
  std::shared_ptr<BackwardProgram> backward_;  // null: no result requires a gradient
  std::vector<int32_t> saved_inputs_;          // buffers of parameters and arguments that backward reads
};

// The programs of one compiled module.
class ModuleCache {
 public:
  explicit ModuleCache(Settings settings) : settings_(std::move(settings)) {}
  // Returns the results of forward. The call that compiles also runs the program.
  CallResult call(const CallArguments& arguments, const TracedFunction& forward);
  size_t size() const { return programs_.programs().size(); }
  const std::vector<std::string>& recompiles() const { return programs_.recompiles(); }
  OneCaller& caller() { return caller_; }

 private:
  Settings settings_;
  FunctionCache<ModuleProgram> programs_;
  OneCaller caller_;
};

}  // namespace tessera::compiler
