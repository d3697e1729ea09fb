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

// The arguments of one call of a compiled function, sorted by kind.
// Modules, optimizers and tensors are lifted: the program reads them anew on every call.
// Numbers and strings are constants of the program: another value recompiles.
class CallArguments {
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
      strings.emplace_back(value);
    } else if constexpr (can_visit<V>) {
      for (auto& t : tensors_of(value)) tensors.push_back(std::move(t));
    } else {
      static_assert(std::is_empty_v<V>,
                    "compile: this argument type needs tessera_visit, which lists its tensors (base/visit.h)");
    }
  }

  const char* program_name = "step";  // in reports
  std::vector<torch::nn::Module*> modules;
  std::vector<OptimizerAccess*> optimizers;
  Tensors leaves;  // parameters that do not belong to any of `modules`
  Tensors tensors;
  std::vector<double> numbers;
  std::vector<std::string> strings;

 private:
  [[noreturn]] static void refuse_torch_optimizer();
};

// All tensors that the arguments hold, each once, with role and name, in this order:
//   1. parameters and buffers of modules ("net1.weight")
//   2. leaves, then parameters that only optimizers have
//   3. optimizer state ("net1.weight.exp_avg")
//   4. gradients that are defined
//   5. tensor arguments, by number
std::vector<Lifted> lift(const CallArguments& arguments);

}  // namespace tessera::compiler
