#pragma once
#include "tessera/compile/data_parallel.h"
#include "tessera/compile/passes/pass.h"
#include "tessera/compile/replay/executable.h"
#include "tessera/compile/signature.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

struct StepOptions {
  std::optional<DataParallel> parallel_mode = {};
  std::vector<Pass> passes = {};
  bool verified = false;  // the program is checked after each pass
  size_t cache_size = 8;  // programs for different arguments; the one that was not used the longest goes
};

// A program for one kind of arguments, with what is around it: whose memory it uses, whose gradients it sets.
class CompiledProgram {
 public:
  // Runs `step` under the tracer. `step` gives what it returns, still distributed or plain.
  CompiledProgram(const Arguments& arguments, const std::function<Tensors()>& step, const StepOptions& options);

  bool fits(const Arguments& arguments, const Signature& signature) const;
  Tensors run(const Arguments& arguments);
  const Signature& signature() const { return signature_; }
  const Executable& executable() const { return *executable_; }
  const std::vector<PassReport>& report() const { return report_; }

 private:
  struct External {
    int32_t buffer;
    at::Tensor handle;   // whose memory it is ...
    int argument = -1;   // ... or the number of the argument that has it
    int64_t offset = 0;  // of that tensor when traced
    const void* bound = nullptr;
    int64_t bound_offset = 0;
    bool written = false;
  };
  struct Gradient {
    at::Tensor parameter, gradient;
  };
  struct Slot {
    at::Tensor parameter;
    bool had_gradient;
  };
  bool trace(const Arguments& arguments, const std::function<Tensors()>& step, const StepOptions& options,
             bool with_stand_ins);
  void bind(const Arguments& arguments);

  Signature signature_;
  std::unique_ptr<Executable> executable_;
  std::vector<External> externals_;
  std::vector<Gradient> gradients_;  // output k of kind Gradient belongs to gradients_[k]
  std::vector<Slot> slots_;          // parameters whose gradient, or lack of one, the program depends on
  std::vector<SpecRef> returned_;    // null: plain
  int64_t draws_ = 0;                // of the random stream, at each run
  std::vector<PassReport> report_;
};

// The programs of one compiled step.
class StepCache {
 public:
  explicit StepCache(StepOptions options) : options_(std::move(options)) {}
  // Returns what the step returns: from a program, also the first time.
  Tensors call(const Arguments& arguments, const std::function<Tensors()>& step);
  const CompiledProgram& last() const;  // the one that ran last; UsageError if none has
  size_t size() const { return programs_.size(); }

 private:
  StepOptions options_;
  std::vector<const void*> partitioned_;                    // modules that are, already
  std::vector<std::unique_ptr<CompiledProgram>> programs_;  // last used first
};

}  // namespace tessera::compiler
