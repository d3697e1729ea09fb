#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <functional>

namespace tessera::detail {

// Checks that Tessera's autograd engine, which calls the packers of saved_tensor_hooks.h, is the default engine. The
// library installs it at load time, before any backward, unless Python's torch is loaded. Throws UsageError if it
// cannot be installed.
void require_engine();

// The arguments of Engine::execute for a backward that is about to run.
struct BackwardCall {
  const torch::autograd::edge_list& roots;
  const torch::autograd::variable_list& gradients;  // of the roots
  bool keep_graph, create_graph, accumulate_grad;
  const torch::autograd::edge_list& outputs;  // backward returns the gradients of these; empty: leaves accumulate them
  std::function<torch::autograd::variable_list(bool keep_graph)> run;  // runs the backward in the engine
};

// In this scope, `handler` runs instead of the engine for each backward of this thread. A backward that starts inside
// of another backward is not affected.
class BackwardScope {
 public:
  using Handler = std::function<torch::autograd::variable_list(const BackwardCall&)>;
  explicit BackwardScope(Handler handler);
  ~BackwardScope();
  BackwardScope(const BackwardScope&) = delete;
  static const Handler* current();  // null outside of a scope

 private:
  Handler handler_;
  const Handler* outer_;
};

}  // namespace tessera::detail
