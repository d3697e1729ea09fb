#pragma once
#include "tessera/compile/detail/trace/random_state_guard.h"

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace tessera::compiler {

// A copy of memory, gradients and random state, to restore them: before a program runs that may fail, and between two
// runs from one state.
class SavedState {
 public:
  // Saves Tessera's random stream and the states of these generators.
  explicit SavedState(const std::vector<at::Generator>& generators);
  void add_memory(const at::Tensor& t);            // the storage of its local tensor; it may be undefined
  void add_gradient(const at::Tensor& parameter);  // which tensor .grad is, and its memory
  void restore();

 private:
  struct SavedGenerator {
    at::Generator generator;
    at::Tensor state;
  };
  std::vector<std::pair<at::Tensor, at::Tensor>> memory_;     // a storage, its copy
  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  // parameter, gradient
  std::vector<SavedGenerator> generators_;
  RandomState stream_;
};

// The storage of a tensor as a tensor with one dim and its dtype.
at::Tensor storage_as_tensor(const at::Tensor& local);

}  // namespace tessera::compiler
