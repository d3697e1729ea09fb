#pragma once
#include "tessera/nn/hooks.h"

namespace tessera::detail {

// Replaces `tensors` by what a hook returned. Throws UsageError with the module's name if the number of tensors
// differs. A null `module` means the running module; its name is computed only for the error.
void replace_tensors(Tensors& tensors, Replacement with, const char* kind, const char* what,
                     const std::string* module = nullptr);

// The backward hooks of one call. Two autograd nodes run them, one after the inputs and one after the outputs:
//
//   forward    inputs -> [A] -> forward -> [B] -> outputs
//   backward   [B] runs the pre hooks and stores grad_outputs; then [A] receives grad_inputs and runs the hooks
class BackwardHooks {
 public:
  BackwardHooks(Module& module, const ModuleHooks& hooks);

  // Inserts [A]: returns aliases of the inputs whose grad_fn is [A].
  Tensors on_inputs(Tensors inputs);
  // Inserts [B]: returns aliases of the outputs whose grad_fn is [B].
  Tensors on_outputs(Tensors outputs);

  struct State;

 private:
  std::shared_ptr<State> state_;  // null: no hooks
};

}  // namespace tessera::detail
