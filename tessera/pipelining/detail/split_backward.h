#pragma once
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>

#include <vector>

// A backward pass in two parts: first the gradients of the inputs, later the gradients of the parameters. A pipeline
// schedule sends the first to the stage before, and computes the second when the rank would wait otherwise.
namespace tessera::pipelining {

// What is left to do for the parameters after backward_input.
//
// A node of the autograd graph that is on a way from the outputs to the inputs, and has a way to a parameter that
// leaves the first, is a boundary. Its incoming gradients are kept; the second part starts at the boundaries.
class WeightBackward {
 public:
  // Accumulates into the gradients of the parameters, as backward() does. At most once.
  void run();

 private:
  friend std::vector<at::Tensor> backward_input(const std::vector<at::Tensor>&, const std::vector<at::Tensor>&,
                                                const std::vector<at::Tensor>&, const std::vector<at::Tensor>&,
                                                WeightBackward&);
  struct Pass {
    torch::autograd::edge_list roots;
    std::vector<at::Tensor> gradients;  // of the roots
    torch::autograd::edge_list parameters;
  };
  std::vector<Pass> passes_;
};

// The gradients of `inputs`, undefined for inputs that do not require one. `gradients`: of the outputs. Sets `weights`.
// A parameter that is used at several places of the stage gets its gradient here; run() only accumulates it. If no
// input requires a gradient, run() does everything.
std::vector<at::Tensor> backward_input(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients,
                                       const std::vector<at::Tensor>& inputs, const std::vector<at::Tensor>& parameters,
                                       WeightBackward& weights);

// The same in one pass: accumulates into the gradients of the parameters and returns the gradients of `inputs`, which
// are leaves.
std::vector<at::Tensor> full_backward(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& gradients,
                                      const std::vector<at::Tensor>& inputs);

}  // namespace tessera::pipelining
