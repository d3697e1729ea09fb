#pragma once
#include "tessera/optim/detail/learning_rate.h"
#include "tessera/state/state_dict.h"

#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>

#include <array>

// Visitors that convert options to and from a state dict, for Options::visit. An optimizer lists its options once, in
// visit().
namespace tessera::optim::detail {

// Writes each option into the dict as a tensor.
struct WriteOptions {
  StateDict& dict;

  void operator()(const char* name, double value) { dict.insert(name, at::scalar_tensor(value, at::kDouble)); }
  void operator()(const char* name, bool value) { dict.insert(name, at::scalar_tensor(value, at::kBool)); }
  void operator()(const char* name, const std::array<double, 2>& value) {
    dict.insert(name, at::tensor({value[0], value[1]}, at::kDouble));
  }
  void operator()(const char* name, const LearningRate& value) { dict.insert(name, value.tensor()); }
};

// Reads each option that the dict has.
struct ReadOptions {
  const StateDict& dict;

  void operator()(const char* name, double& value) {
    if (const auto* t = dict.find(name)) value = t->item<double>();
  }
  void operator()(const char* name, bool& value) {
    if (const auto* t = dict.find(name)) value = t->item<bool>();
  }
  void operator()(const char* name, std::array<double, 2>& value) {
    if (const auto* t = dict.find(name)) value = {(*t)[0].item<double>(), (*t)[1].item<double>()};
  }
  void operator()(const char* name, LearningRate& value) {
    if (const auto* t = dict.find(name)) value.set(t->item<double>());
  }
};

}  // namespace tessera::optim::detail
