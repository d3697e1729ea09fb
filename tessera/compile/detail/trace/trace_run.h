#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/trace/random_state_guard.h"
#include "tessera/compile/detail/trace/tracer.h"

#include <functional>
#include <string>
#include <vector>

namespace tessera::compiler {

// One run of a function under the tracer. The destructor undoes everything that the run changed:
//
//   memory         each storage that existed before and was written; optimizer state tensors are among them
//   inputs         sizes, strides and memory of each tensor that existed before
//   gradients      .grad of each parameter
//   random state   LibTorch's generators and Tessera's stream
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
  // `generators`: those that an earlier trace of the function has found (see GeneratorStates).
  explicit TraceRun(std::vector<Lifted> inputs, bool gradient_placeholders = false,
                    const std::vector<at::Generator>& generators = {});
  ~TraceRun();
  TraceRun(const TraceRun&) = delete;

  Tracer& tracer() { return tracer_; }
  // Calls the function. UsageError if it reads or writes memory by a pointer.
  Tensors call(const std::function<Tensors()>& function);
  const std::vector<SavedGradient>& gradients() const { return gradients_; }
  bool any_gradient_undefined() const;  // before the run
  const RandomStateGuard& random() const { return random_; }

  // Completes collectives that still write gradients. Call it while recording, so that the waits are recorded.
  void wait_for_gradients() const;
  // UsageError if the run gave an input an autograd history: the next call would backpropagate through this one.
  void check_inputs_have_no_new_history() const;
  // UsageError if the run changed the sizes, strides or memory of an input in place.
  void check_inputs_have_their_shapes();
  void restore_memory() { tracer_.restore_memory(); }

 private:
  std::vector<SavedGradient> gradients_;
  std::vector<Lifted> inputs_;
  std::vector<const void*> histories_;  // grad_fn of each input
  RandomStateGuard random_;
  Tracer tracer_;
};

}  // namespace tessera::compiler
