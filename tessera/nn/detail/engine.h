#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <functional>

namespace tessera::detail {

// Makes sure that autograd's engine is ours, which asks the packers of saved_tensor_hooks.h. Installed when the library
// is loaded, before any backward, unless Python's torch is there. Throws UsageError where it cannot be.
void require_engine();

// A backward that is about to run.
struct BackwardCall {
  const torch::autograd::edge_list& roots;
  const torch::autograd::variable_list& gradients;  // that flow into the roots
  bool keep_graph, create_graph, accumulate_grad;
  const torch::autograd::edge_list& outputs;  // whose gradients are returned; none: leaves get them
  std::function<torch::autograd::variable_list(bool keep_graph)> run;  // as it would have
};

// While alive, backwards of this thread, but for those inside of a backward, are handed to `take` instead of being run.
class BackwardScope {
 public:
  using Take = std::function<torch::autograd::variable_list(const BackwardCall&)>;
  explicit BackwardScope(Take take);
  ~BackwardScope();
  BackwardScope(const BackwardScope&) = delete;
  static const Take* current();  // null: none

 private:
  Take take_;
  const Take* outer_;
};

}  // namespace tessera::detail
