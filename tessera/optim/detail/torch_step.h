#pragma once
#include <torch/optim/optimizer.h>

#include <optional>

// step() of torch::optim optimizers inside of compiled steps. A compiled step that captures such an optimizer calls
// step() of the object itself, which counts steps on the host. So the first compile() exchanges one entry in the table
// of virtual functions of SGD, Adam, AdamW, RMSprop, Adagrad and LBFGS: the new function asks the TorchStepHandler of
// this thread, and calls LibTorch's step() without one. A call that the compiler of the user has made direct,
// which needs the object in the same function, is not seen; two traces of such a step differ, which is an error.
namespace tessera::optim::detail {

// Sees the calls of step() on this thread while alive.
class TorchStepHandler {
 public:
  TorchStepHandler();
  virtual ~TorchStepHandler();
  TorchStepHandler(const TorchStepHandler&) = delete;
  // Does the step, or returns nothing: then the optimizer itself does it.
  virtual std::optional<at::Tensor> step(torch::optim::Optimizer& optimizer,
                                         torch::optim::Optimizer::LossClosure& closure) = 0;

 private:
  TorchStepHandler* outer_;
};

}  // namespace tessera::optim::detail
