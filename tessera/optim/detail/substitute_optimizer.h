#pragma once
#include "tessera/optim/optimizer.h"

#include <memory>
#include <typeindex>
#include <unordered_map>
#include <vector>

// Optimizers of torch::optim as arguments of compiled steps. They count their steps on the host, so a program of their
// step() would repeat the first one. A compiled step therefore gets a substitute in place of the optimizer:
//
//   torch::optim::Adam  ---->  an object of a class derived from torch::optim::Adam, whose step() is that of a
//                              tessera::optim::Adam with the same parameters, options and state tensors
//
// Before a call the substitute takes over what has changed in the original: options, parameters, state. After it, the
// original gets new state and the step counts. So the original can be used, saved and loaded at any time.
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
  void start_call() { in_call_.clear(); }
  // After a call: the optimizers that of() was called for since start_call() get what has changed.
  void write_back();

 private:
  struct Entry {
    std::type_index type = typeid(void);  // of the original
    std::unique_ptr<SubstituteOptimizer> substitute = {};
  };
  // By address of the original. If another optimizer has this address now, of() replaces the entry or updates it.
  std::unordered_map<const void*, Entry> all_;
  std::vector<SubstituteOptimizer*> in_call_;
};

}  // namespace tessera::optim::detail
