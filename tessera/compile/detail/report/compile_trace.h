#pragma once
#include "tessera/compile/detail/passes/pass_observer.h"
#include "tessera/compile/detail/replay/memory_plan.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

// The history of a compilation: the program as traced, after every pass, and as it runs. TESSERA_TRACE_DIR writes it as
// HTML pages.
namespace tessera::compiler {

class Executable;

struct TraceStage {
  PassReport pass;
  Program program;  // after the pass
};

struct CompileTrace {
  std::string what;  // "step", "forward", "backward", "backward_weights"
  int64_t rank = 0, ranks = 1;
  std::vector<TraceStage> stages;    // the first is "traced", the last "runs"
  MemoryPlan memory;                 // of the last stage
  std::string recompiled_because;    // empty: the first program of its function
  std::vector<double> milliseconds;  // of the first run, by node of the last stage; empty: it did not run
};

using TraceSink = std::function<void(const CompileTrace&)>;
// A sink that writes pages `folder`/step-0.rank0.html, step-1.rank0.html, ..., forward-0.rank0.html. If a page cannot
// be written, it warns once.
TraceSink trace_into(std::string folder);

// Records all passes on this thread from construction to finish(), if there is a sink.
class TraceRecorder final : PassObserver {
 public:
  TraceRecorder(const TraceSink& sink, std::string what, const Program& traced, std::string recompiled_because);
  void finish(Executable& executable);  // the sink is called after the first run, or when the executable is freed
  void after_pass(const Program& program, const PassReport& report) override;

 private:
  const TraceSink& sink_;
  CompileTrace trace_;
  std::optional<PassObserverScope> scope_;
};

}  // namespace tessera::compiler
