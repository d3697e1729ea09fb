#pragma once
#include "tessera/nn/hooks.h"

namespace tessera::detail {

// What a hook returned takes the place of what it saw. Throws UsageError if it is another number of tensors,
// with the name of the module; null: the one that runs, which is looked up then and not before.
void replace_tensors(Tensors& seen, Replacement with, const char* kind, const char* what,
                     const std::string* module = nullptr);

// The backward hooks of one call. Two nodes in the graph carry them, one behind the inputs and one behind the outputs:
//
//   forward    inputs -> [A] -> forward -> [B] -> outputs
//   backward   [B] runs the pre hooks and keeps grad_outputs; [A], which runs last, has grad_inputs and runs the hooks
class BackwardHooks {
 public:
  BackwardHooks(Module& module, const ModuleHooks& hooks);

  // The inputs with [A] behind them.
  Tensors on_inputs(Tensors inputs);
  // The outputs with [B] behind them.
  Tensors on_outputs(Tensors outputs);

  struct State;

 private:
  std::shared_ptr<State> state_;  // null: no hooks
};

}  // namespace tessera::detail
