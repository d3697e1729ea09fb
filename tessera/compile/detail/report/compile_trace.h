#pragma once
#include "tessera/compile/detail/passes/pass_observer.h"
#include "tessera/compile/detail/replay/memory_plan.h"

#include <functional>
#include <optional>
#include <string>
#include <vector>

// How a program came to be: as it was traced, after every pass, and as it runs.
namespace tessera::compiler {

class Executable;

struct TraceStage {
  PassReport pass;
  Program program;  // after it
};

struct CompileTrace {
  std::string what;  // "step", "forward", "backward"
  int64_t rank = 0, ranks = 1;
  std::vector<TraceStage> stages;  // the first is "traced", the last "runs"
  MemoryPlan memory;               // of the program that runs
};

using TraceSink = std::function<void(const CompileTrace&)>;
// Writes each as a page `folder`/step-0.rank0.html, step-1.rank0.html, ..., forward-0.rank0.html. Where it cannot, that
// is said once.
TraceSink trace_into(std::string folder);

// Notes what happens to a program from here on, if there is a sink to tell.
class TraceRecorder final : PassObserver {
 public:
  TraceRecorder(const TraceSink& sink, std::string what, const Program& traced);
  void finish(const Executable& executable);  // tells the sink
  void after_pass(const Program& program, const PassReport& report) override;

 private:
  const TraceSink& sink_;
  CompileTrace trace_;
  std::optional<PassObserverScope> scope_;
};

}  // namespace tessera::compiler
