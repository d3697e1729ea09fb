#pragma once
#include "tessera/compile/detail/trace/random_state_guard.h"
#include "tessera/compile/detail/trace/tracer.h"

#include <string>
#include <vector>

namespace tessera::compiler {

// One run of a function under the tracer. The destructor undoes everything that the run changed:
//
//   memory         each storage that existed before and was written; optimizer state tensors are among them
//   gradients      .grad of each parameter
//   random state   LibTorch's CPU generator and Tessera's stream
//   host state     the owners (optimizers, FSDP units, ...) register CompilingScope::on_trace_end callbacks; these run
//                  when the CompilingScope around the traced call ends, on return and on error
//
// Steps and modules are compiled by the same sequence:
//
//   lift(arguments)              collect the inputs
//   TraceRun run(inputs)         snapshot
//   record under run.tracer()    run the function, collect its outputs
//   take_guards(), draws()       collect what replay depends on
//   run.restore_memory()
//   run.tracer().finish()        the traced program
//   build_executable()           passes, lowering, executable
class TraceRun {
 public:
  // Gradient of a parameter before the run.
  struct SavedGradient {
    at::Tensor parameter, gradient;
    at::Tensor placeholder;  // zeros that replace an undefined gradient during the run; may be undefined
    std::string name;        // of the parameter
    const at::Tensor& during_trace() const { return placeholder.defined() ? placeholder : gradient; }
  };

  // `gradient_placeholders`: parameters without a gradient get one of zeros, which is an input like any other.
  explicit TraceRun(std::vector<Lifted> inputs, bool gradient_placeholders = false);
  ~TraceRun();
  TraceRun(const TraceRun&) = delete;

  Tracer& tracer() { return tracer_; }
  const std::vector<SavedGradient>& gradients() const { return gradients_; }
  bool any_gradient_undefined() const;  // before the run
  int64_t draws() const { return random_.draws(); }

  // Completes collectives that still write gradients. Call it while recording, so that the waits are recorded.
  void wait_for_gradients() const;
  // UsageError if the run gave an input an autograd history: the next call would backpropagate through this one.
  void check_inputs_have_no_new_history() const;
  void restore_memory() { tracer_.restore_memory(); }

 private:
  std::vector<SavedGradient> gradients_;
  std::vector<Lifted> inputs_;
  std::vector<const void*> histories_;  // grad_fn of each input
  RandomStateGuard random_;
  Tracer tracer_;
};

}  // namespace tessera::compiler
