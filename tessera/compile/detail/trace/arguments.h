#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/detail/trace/tracer.h"
#include "tessera/state/optimizer_state.h"

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <string>
#include <type_traits>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace tessera::compiler {

// What a compiled step was called with: modules, optimizers, tensors, and numbers, which are part of the program.
class Arguments {
 public:
  template <class T>
  void add(T& value) {
    using V = std::remove_cv_t<T>;
    if constexpr (std::is_base_of_v<torch::nn::Module, V>) {
      modules.push_back(const_cast<std::remove_const_t<T>*>(&value));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    } else if constexpr (std::is_base_of_v<OptimizerAccess, V>) {
      optimizers.push_back(
          const_cast<std::remove_const_t<T>*>(&value));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    } else if constexpr (std::is_base_of_v<torch::optim::Optimizer, V>) {
      refuse_torch_optimizer();
    } else if constexpr (requires { static_cast<torch::nn::Module&>(*value); }) {
      add(static_cast<torch::nn::Module&>(*value));
    } else if constexpr (std::is_arithmetic_v<V> || std::is_enum_v<V>) {
      numbers.push_back(static_cast<double>(value));
    } else if constexpr (std::is_convertible_v<const V&, std::string>) {
      words.emplace_back(value);
    } else if constexpr (can_visit<V>) {
      for (auto& t : tensors_of(value)) tensors.push_back(std::move(t));
    } else {
      static_assert(std::is_empty_v<V>,
                    "compile: say which tensors this argument holds with tessera_visit (base/visit.h)");
    }
  }

  const char* what = "step";  // in reports
  std::vector<torch::nn::Module*> modules;
  std::vector<OptimizerAccess*> optimizers;
  Tensors leaves;  // parameters that belong to no module here
  Tensors tensors;
  std::vector<double> numbers;
  std::vector<std::string> words;

 private:
  [[noreturn]] static void refuse_torch_optimizer();
};

// Everything that is lifted from the arguments, each tensor once: parameters and buffers of modules under their names,
// then parameters that only optimizers have, state of optimizers ("net1.weight.exp_avg"), gradients that are there, and
// the tensors, numbered.
std::vector<Lifted> lift(const Arguments& arguments);

}  // namespace tessera::compiler
