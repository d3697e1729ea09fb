#pragma once
#include "tessera/compile/detail/api/module_program.h"
#include "tessera/compile/detail/api/result_prototype.h"
#include "tessera/compile/detail/api/step_program.h"

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

// The counterpart of torch.compile for C++: compile(step) for a training step, compile(module) for a module.
namespace tessera {

// A compiled function. The first call traces it, compiles a program and runs the program; later calls run the program.
// Created by compile().
template <class F>
class CompiledStep {
 public:
  // Prefer compile().
  CompiledStep(F step, const CompileOptions& options)
      : step_(std::move(step)), cache_(std::make_shared<compiler::StepCache>(compiler::settings_from(options))) {}

  // Calls the function by its program. A call whose guards fail (other shapes, dtypes, placements, modes) recompiles.
  template <class... Args>
  auto operator()(Args&&... args) {
    using Result = std::remove_cvref_t<std::invoke_result_t<F&, Args&...>>;
    compiler::CallArguments arguments;
    (arguments.add(args), ...);
    if constexpr (std::is_void_v<Result>) {
      cache_->call(std::move(arguments), [&] {
        step_(args...);
        return Tensors();
      });
    } else {
      static_assert(can_visit<Result>,
                    "compile: the result type needs tessera_visit, which lists its tensors (base/visit.h)");
      std::optional<Result> result;
      const auto tensors = cache_->call(std::move(arguments), [&] {
        result.emplace(step_(args...));
        auto found = tensors_of(*result);
        assign_tensors(*result, Tensors(found.size()));
        return found;
      });
      return prototype_.with_tensors(std::move(result), tensors);
    }
  }

  // The programs that are cached, one per set of guards: step.cache().size().
  const compiler::StepCache& cache() const { return *cache_; }
  // The program that ran last. UsageError before the first call.
  const compiler::Executable& executable() const { return cache_->last().executable(); }
  // The program that ran last as text, one op per line, with how often each has run and the bytes of collectives.
  std::string listing() const { return executable().listing(); }
  // The passes of the program that ran last: name, number of matches, time.
  const std::vector<compiler::PassReport>& report() const { return cache_->last().report(); }

 private:
  F step_;
  std::shared_ptr<compiler::StepCache> cache_;
  compiler::ResultPrototype prototype_;
};

// Compiles a training step, or any function of tensors. Its arguments may be modules, optimizers of tessera::optim,
// tensors, tuples, structs with tessera_visit, and numbers. It may run forward, backward, gradient clipping, optimizer
// steps and collectives.
//
//   auto step = compile([](auto& model, auto& opt, const Batch& batch) {
//     opt.zero_grad();
//     auto loss = torch::mse_loss(model(batch.x), batch.y);
//     loss.backward();
//     opt.step();
//     return loss;
//   });
//   for (...) step(model, opt, batch);
//
// Returned tensors do not require gradients. Numbers among the arguments are constants of the program: another value
// recompiles. Learning rates, step counts and random numbers are read on every call.
template <class F>
requires(!std::is_base_of_v<torch::detail::ModuleHolderIndicator, F>)
    CompiledStep<F> compile(F step, const CompileOptions& options = {}) {
  return CompiledStep<F>(std::move(step), options);
}

// A module whose forward and backward run as compiled programs (PyTorch: OptimizedModule). Created by compile().
template <class H>
class CompiledModule {
 public:
  // Prefer compile().
  CompiledModule(H module, const CompileOptions& options)
      : module_(std::move(module)), cache_(std::make_shared<compiler::ModuleCache>(options)) {}

  // Calls forward by its program. backward() of the results runs the backward program.
  template <class... Args>
  auto operator()(Args&&... args) {
    using Result = std::remove_cvref_t<decltype(module_(args...))>;
    static_assert(can_visit<Result>,
                  "compile: the result type needs tessera_visit, which lists its tensors (base/visit.h)");
    compiler::CallArguments arguments;
    arguments.add(module_);
    (arguments.add(args), ...);
    std::optional<Result> result;
    const auto tensors = cache_->call(arguments, [&] {
      result.emplace(module_(args...));
      return tensors_of(*result);
    });
    return prototype_.with_tensors(std::move(result), tensors);
  }

  // The module that was compiled. Parameters are shared with it.
  H& orig_mod() { return module_; }
  // Members of the module that was compiled: compiled->parameters().
  auto* operator->() { return module_.get(); }
  auto& operator*() { return *module_; }
  // The programs that are cached, one per set of guards: compiled.cache().size().
  const compiler::ModuleCache& cache() const { return *cache_; }

 private:
  H module_;
  std::shared_ptr<compiler::ModuleCache> cache_;
  compiler::ResultPrototype prototype_;
};

// Compiles a module holder: forward and backward become two programs, the rest of the module is unchanged.
//
//   auto compiled = compile(model);
//   auto loss = compiled(x).sum();
//   loss.backward();
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> CompiledModule<H> compile(
    H module, const CompileOptions& options = {}) {
  return CompiledModule<H>(std::move(module), options);
}

}  // namespace tessera
