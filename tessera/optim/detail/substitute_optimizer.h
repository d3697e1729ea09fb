#pragma once
#include "tessera/optim/detail/torch_step.h"
#include "tessera/optim/optimizer.h"

#include <memory>
#include <typeindex>
#include <unordered_map>
#include <vector>

// Optimizers of torch::optim in compiled steps, as arguments or captured. They count their steps on the host, so a
// program of their step() would repeat the first one. A compiled step therefore gets a substitute in place of the
// optimizer:
//
//   torch::optim::Adam  ---->  an object of a class derived from torch::optim::Adam, whose step() is that of a
//                              tessera::optim::Adam with the same parameters, options and state tensors
//
// Before a call the substitute takes over what has changed in the original: options, parameters, state. After it, the
// original gets new state and the step counts. So the original can be used, saved and loaded at any time.
//
// A step that has captured the optimizer calls step() of the original, which TorchStepHandler sees. A substitute is
// possible if the closure has the address of the optimizer (it was captured by reference, or by a shared_ptr): then the
// optimizer exists in every call, as in eager mode.
namespace tessera::optim::detail {

// The substitute of one optimizer.
class SubstituteOptimizer {
 public:
  virtual ~SubstituteOptimizer() = default;
  virtual torch::optim::Optimizer& as_torch() = 0;  // of the original's class
  virtual Optimizer& own() = 0;                     // does the steps
  virtual void read_original() = 0;
  // Throws UsageError if the options of the original were changed by the call, and restores them.
  virtual void write_original() = 0;
};

// A substitute of `optimizer`, or nullptr if it needs none, because it is an OptimizerAccess. Throws UsageError for
// LBFGS and for classes that are not LibTorch's. Requires: the optimizer outlives it.
std::unique_ptr<SubstituteOptimizer> make_substitute(torch::optim::Optimizer& optimizer);

// Thrown in a traced step at the first step() of an optimizer that it has captured. The call begins again, and the
// optimizer is one of its inputs.
struct FoundCapturedOptimizer {};

// The substitutes of one compiled step.
class SubstituteOptimizers {
 public:
  // The optimizer that the step gets in place of `optimizer`, up to date.
  torch::optim::Optimizer& of(torch::optim::Optimizer& optimizer);
  // The same for a class derived from it.
  template <class T>
  T& of(T& optimizer) {
    return static_cast<T&>(of(static_cast<torch::optim::Optimizer&>(optimizer)));
  }
  // Brings the substitutes of captured optimizers up to date.
  void start_call();
  // After a call: the optimizers that of() was called for since start_call() get what has changed.
  void write_back();

  // Why `optimizer` cannot have a substitute; "": it can, or needs none.
  static std::string reason_against(torch::optim::Optimizer& optimizer);
  // The optimizers that do the steps of captured ones.
  const std::vector<Optimizer*>& own_of_captured() const { return own_of_captured_; }

  // While alive, captured optimizers have substitutes on this thread. `closure`: the compiled function.
  class Captured final : public TorchStepHandler {
   public:
    // Forgets optimizers that the closure has replaced: they may be destroyed.
    Captured(SubstituteOptimizers& substitutes, const void* closure, size_t bytes);
    std::optional<at::Tensor> step(torch::optim::Optimizer& optimizer,
                                   torch::optim::Optimizer::LossClosure& closure) override;

   private:
    bool closure_has(const torch::optim::Optimizer* optimizer) const;
    SubstituteOptimizers& substitutes_;
    const char* closure_;
    size_t bytes_;
  };

 private:
  struct Entry {
    std::type_index type = typeid(void);  // of the original
    std::unique_ptr<SubstituteOptimizer> substitute = {};
  };
  // By address of the original. If another optimizer has this address now, of() replaces the entry or updates it.
  std::unordered_map<const void*, Entry> all_;
  std::vector<SubstituteOptimizer*> in_call_;
  std::vector<torch::optim::Optimizer*> captured_;
  std::vector<Optimizer*> own_of_captured_;  // of `captured_`, since start_call()
};

}  // namespace tessera::optim::detail
