#pragma once
#include "tessera/compile/detail/api/compiled_module.h"
#include "tessera/compile/detail/api/compiled_step.h"

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

namespace tessera {

// A function that is traced when it is first called and runs as a program from then on, the first time included.
// See compile().
template <class F>
class CompiledStep {
 public:
  CompiledStep(F step, const CompileOptions& options)
      : step_(std::move(step)), cache_(std::make_shared<compiler::StepCache>(compiler::settings_from(options))) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    using Result = std::remove_cvref_t<std::invoke_result_t<F&, Args&...>>;
    compiler::Arguments given;
    (given.add(args), ...);
    if constexpr (std::is_void_v<Result>) {
      cache_->call(std::move(given), [&] {
        step_(args...);
        return Tensors();
      });
    } else {
      static_assert(can_visit<Result>, "compile: say which tensors the result holds with tessera_visit (base/visit.h)");
      std::optional<Result> result;
      const auto tensors = cache_->call(std::move(given), [&] {
        result.emplace(step_(args...));
        auto found = tensors_of(*result);
        assign_tensors(*result, Tensors(found.size()));
        return found;
      });
      auto& prototype = prototype_of<Result>();
      if (result) prototype = std::move(result);
      Result returned = *prototype;
      assign_tensors(returned, tensors);
      return returned;
    }
  }

  const compiler::StepCache& cache() const { return *cache_; }
  const compiler::Executable& executable() const { return cache_->last().executable(); }
  std::string listing() const { return executable().listing(); }
  const std::vector<compiler::PassReport>& report() const { return cache_->last().report(); }

 private:
  template <class Result>
  std::optional<Result>& prototype_of() {
    if (!prototype_) prototype_ = std::make_shared<std::optional<Result>>();
    return *std::static_pointer_cast<std::optional<Result>>(prototype_);
  }

  F step_;
  std::shared_ptr<compiler::StepCache> cache_;
  std::shared_ptr<void> prototype_;
};

// Compiles a train step, or any function of tensors. Its arguments may be modules and holders, optimizers, tensors,
// tuples, structs that say their tensors, numbers; it may do forward, backward, clipping, optimizer steps, collectives.
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
// What it returns does not require gradients: the step is over. Numbers among the arguments are part of the program;
// learning rates, step counts and random numbers are not. Changed shapes, dtypes, layouts or modes compile it again.
template <class F>
requires(!std::is_base_of_v<torch::detail::ModuleHolderIndicator, F>)
    CompiledStep<F> compile(F step, const CompileOptions& options = {}) {
  return CompiledStep<F>(std::move(step), options);
}

// A module whose forward, and the backward of that, run as programs. Everything else is the module's: orig_mod(), or
// ->.
template <class H>
class CompiledModule {
 public:
  CompiledModule(H module, const CompileOptions& options)
      : module_(std::move(module)), cache_(std::make_shared<compiler::ModuleCache>(options)) {}

  template <class... Args>
  auto operator()(Args&&... args) {
    using Result = std::remove_cvref_t<decltype(module_(args...))>;
    static_assert(can_visit<Result>, "compile: say which tensors the result holds with tessera_visit (base/visit.h)");
    compiler::Arguments given;
    given.add(module_);
    (given.add(args), ...);
    std::optional<Result> result;
    const auto tensors = cache_->call(given, [&] {
      result.emplace(module_(args...));
      return tensors_of(*result);
    });
    if (!prototype_) prototype_ = std::make_shared<std::optional<Result>>();
    auto& prototype = *std::static_pointer_cast<std::optional<Result>>(prototype_);
    if (result) {
      assign_tensors(*result, Tensors(tensors_of(*result).size()));
      prototype = std::move(result);
    }
    Result returned = *prototype;
    assign_tensors(returned, tensors);
    return returned;
  }

  H& orig_mod() { return module_; }
  auto* operator->() { return module_.get(); }
  auto& operator*() { return *module_; }
  const compiler::ModuleCache& cache() const { return *cache_; }

 private:
  H module_;
  std::shared_ptr<compiler::ModuleCache> cache_;
  std::shared_ptr<void> prototype_;
};

template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> CompiledModule<H> compile(
    H module, const CompileOptions& options = {}) {
  return CompiledModule<H>(std::move(module), options);
}

}  // namespace tessera
