#pragma once
#include "tessera/compile/detail/replay/bindings.h"
#include "tessera/compile/api/options.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/trace/signature.h"

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera::compiler {

// A program for one kind of arguments, with what is around it: whose memory it uses, whose gradients it sets.
class CompiledProgram {
 public:
  // Runs `step` under the tracer, several times where it has to. `step` gives what it returns, still distributed or
  // plain.
  // `keeps_gradients`: it is known to add to the gradients that are there.
  CompiledProgram(const Arguments& arguments, const std::function<Tensors()>& step, const Settings& options,
                  bool keeps_gradients = false);

  bool fits(const Arguments& arguments, const Signature& signature) const;
  Tensors run(const Arguments& arguments);
  const Signature& signature() const { return signature_; }
  const Executable& executable() const { return *executable_; }
  const std::vector<PassReport>& report() const { return report_; }  // of every pass that ran, with its time

 private:
  struct Gradient {
    at::Tensor parameter, gradient;
    size_t holders = 0;  // of its memory, after a run: the program's own
  };
  struct Slot {
    at::Tensor parameter;
    std::optional<Type> gradient;  // that it had
  };
  enum class Traced : uint8_t { Done, NeedsGradients, FoundLeaves, Disturbed };
  Traced trace(const Arguments& arguments, const std::function<Tensors()>& step, const Settings& options,
               CompilingScope::Of of, bool with_stand_ins);
  void find_gradients();
  void give_up_held_gradients();

  Signature signature_;
  Tensors captured_;  // leaves that nobody gave as an argument
  std::unique_ptr<Executable> executable_;
  Bindings bindings_;
  std::vector<Gradient> gradients_;  // output k of kind Gradient belongs to gradients_[k]
  std::vector<Gradient> outside_;    // gradients that lie in memory from outside: in a bucket, say
  Tensors without_gradient_;         // parameters that the step leaves without
  std::vector<Slot> slots_;          // parameters whose gradient, or lack of one, the program depends on
  std::vector<SpecRef> returned_;    // null: plain
  std::vector<CompilingScope::Guard> guards_;
  std::vector<CompilingScope::Effect> effects_;  // of each run, on the host
  int64_t draws_ = 0;                            // of the random stream, at each run
  std::vector<PassReport> report_;
};

// The programs of one compiled step.
class StepCache {
 public:
  explicit StepCache(Settings settings) : options_(std::move(settings)) {}
  // Returns what the step returns: from a program, also the first time.
  Tensors call(Arguments arguments, const std::function<Tensors()>& step);
  const CompiledProgram& last() const;  // the one that ran last; UsageError if none has
  size_t size() const { return programs_.size(); }

 private:
  Settings options_;
  std::vector<const void*> partitioned_;                    // modules that are, already
  std::vector<std::unique_ptr<CompiledProgram>> programs_;  // last used first
  std::vector<Signature> eager_;                            // what cannot be compiled, and need not be
  IdlePasses idle_;
};

}  // namespace tessera::compiler
