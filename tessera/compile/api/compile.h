#pragma once
#include "tessera/compile/detail/api/call_with_numbers.h"
#include "tessera/compile/detail/api/classic_locale.h"
#include "tessera/compile/detail/api/module_program.h"
#include "tessera/compile/detail/api/step_program.h"
#include "tessera/compile/detail/api/with_substitutes.h"
#include "tessera/tracing/detail/number_input.h"

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

// The counterpart of torch.compile for C++: compile(step) for a training step, compile(module) for a module.
namespace tessera {

// A variable that a compiled step captures and that changes between calls. live() creates it.
template <class T>
class Live {
 public:
  explicit Live(const T& variable) : variable_(&variable) {}
  // The present value.
  operator T() const { return value(); }  // NOLINT(google-explicit-constructor)
  T value() const {
    if constexpr (std::is_same_v<T, double>) {
      return read_live_number(variable_);
    } else {
      if (compiling()) add_guard();
      return *variable_;
    }
  }

 private:
  void add_guard() const {
    LiveNumberScope::note_read();
    if constexpr (std::is_base_of_v<at::TensorBase, T>) {
      // The guard holds the tensor, so that no other tensor gets its address.
      CompilingScope::add_guard([at = variable_, traced = *variable_] { return int64_t{at->is_same(traced)}; });
    } else if constexpr (std::is_convertible_v<const T&, std::string_view>) {
      CompilingScope::add_guard([at = variable_] {
        const std::string_view text = *at;
        return static_cast<int64_t>(hash_bytes(text.data(), text.size()));
      });
    } else {
      static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>,
                    "live: only numbers, enums, strings and tensors can be live; pass other objects as arguments");
      CompilingScope::add_guard([at = variable_] { return static_cast<int64_t>(hash_bytes(at, sizeof(T))); });
    }
  }
  const T* variable_;
};

// Declares a captured variable that changes between calls of a compiled step. A double is an input of the program, as a
// double argument is. Another value of another type recompiles. The variable must outlive the step.
//
//   double beta = 0;
//   auto step = compile([&, beta = live(beta)](const at::Tensor& x) { return loss(x) + beta.value() * penalty(x); });
template <class T>
Live<T> live(const T& variable) {
  return Live<T>(variable);
}
template <class T>
Live<T> live(const T&& variable) = delete;  // a temporary does not outlive the step

// A compiled function. The first call traces it, compiles a program and runs the program; later calls run the program.
// Created by compile(). Copies share their programs. Two threads must not call it, or a copy, at the same time
// (UsageError): each calls compile() itself.
template <class F>
class CompiledStep {
 public:
  // Prefer compile().
  CompiledStep(F step, const CompileOptions& options) : step_(std::move(step)) {
    auto settings = compiler::settings_from(options);
    settings.has_captures = !std::is_empty_v<F> && !std::is_pointer_v<F> && !kVisitable && !settings.captures_none;
    settings.attempt.function = compiler::function_key(typeid(F).name());
    cache_ = std::make_shared<compiler::StepCache>(std::move(settings));
  }

  // Calls the function by its program. A call whose guards fail (other shapes, dtypes, placements, modes) recompiles.
  // Inside a step that is compiled itself, the function is a part of that step.
  template <class... Args>
  auto operator()(Args&&... args) {
    using Result = std::remove_cvref_t<std::invoke_result_t<F&, Args&...>>;
    if (compiling()) return static_cast<Result>(step_(args...));
    const compiler::OneCaller::Scope calls(cache_->caller());
    std::string refused;
    ((refused += refused.empty() ? compiler::reason_against(args) : ""), ...);
    if (!refused.empty()) {
      cache_->refuse_or_warn(refused);
      return static_cast<Result>(step_(args...));
    }
    const optim::detail::SubstituteOptimizers::Captured captured(*substitutes_, &step_, sizeof(F));
    for (;;) {
      try {
        return compiler::with_substitutes(
            *substitutes_, [this](auto&... each) { return call(each...); }, args...);
      } catch (const optim::detail::FoundCapturedOptimizer&) {  // NOLINT(bugprone-empty-catch): again, with it
      }
    }
  }

  // True if a call with these arguments would run a cached program. Checks the guards, and runs nothing.
  template <class... Args>
  bool is_cached(Args&&... args) const {
    const optim::detail::SubstituteOptimizers::Captured captured(*substitutes_, &step_, sizeof(F));
    return compiler::with_substitutes(
        *substitutes_,
        [this](auto&... each) {
          auto arguments = arguments_of<void>(each...);
          return cache_->has_program_for(std::move(arguments));
        },
        args...);
  }
  // Saves the cached program for these arguments (PyTorch: aoti_compile_and_package): program, memory, built kernels.
  // Another process loads it with CompileOptions::load, and its first call does not trace:
  //
  //   step.save("train.step", model, opt, batch);                      // after one call
  //   auto step = ts::compile(train_step, {.load = "train.step"});     // in another process
  //
  // The file is for this user and machine: Tessera, LibTorch, processor and key are compared. UsageError if no program
  // is cached for these arguments, or if the step depends on what a file cannot contain: captured variables,
  // collectives, schedulers, tensors that it keeps.
  template <class... Args>
  void save(const std::string& file, Args&&... args) const {
    using Result = std::remove_cvref_t<std::invoke_result_t<F&, Args&...>>;
    const optim::detail::SubstituteOptimizers::Captured captured(*substitutes_, &step_, sizeof(F));
    compiler::with_substitutes(
        *substitutes_, [&](auto&... each) { cache_->save(file, arguments_of<Result>(each...)); }, args...);
  }
  // The programs that are cached, one per set of guards: step.cache().size().
  const compiler::StepCache& cache() const { return *cache_; }
  // The program that ran last. UsageError before the first call.
  const compiler::Executable& executable() const { return cache_->last().executable(); }
  // The program that ran last as text, one op per line, with how often each has run and the bytes of collectives.
  std::string listing() const {
    const compiler::ClassicLocaleScope numbers_in_text;
    return executable().listing();
  }
  // Why each compilation after the first was necessary: "argument 0 is f32[64, 10], it was f32[32, 10]".
  const std::vector<std::string>& recompiles() const { return cache_->recompiles(); }
  // The passes of the program that ran last: name, number of matches, time.
  const std::vector<compiler::PassReport>& report() const { return cache_->last().report(); }

 private:
  // A class with tessera_visit lists all that it holds.
  static constexpr bool kVisitable = tessera::detail::HasTesseraVisit<F>;

  template <class Result, class... Args>
  compiler::CallArguments arguments_of(Args&... args) const {
    compiler::CallArguments arguments;
    arguments.describe_result = &compiler::describe_new_result<Result>;
    (arguments.add(args), ...);
    for (auto* own : substitutes_->own_of_captured()) arguments.optimizers.push_back(own);
    if constexpr (kVisitable) arguments.add_captures(step_);
    return arguments;
  }
  template <class... Args>
  auto call(Args&... args) {
    using Result = std::remove_cvref_t<std::invoke_result_t<F&, Args&...>>;
    auto arguments = arguments_of<Result>(args...);
    if constexpr (std::is_void_v<Result>) {
      cache_->call(std::move(arguments), [&](const std::vector<double>* numbers) {
        compiler::call_with_numbers(step_, numbers, args...);
        return compiler::TracedResult();
      });
    } else {
      static_assert(can_visit<Result>,
                    "compile: the result type needs tessera_visit, which lists its tensors (base/visit.h)");
      std::optional<Result> result;
      const auto call = cache_->call(std::move(arguments), [&](const std::vector<double>* numbers) {
        result.emplace(compiler::call_with_numbers(step_, numbers, args...));
        return compiler::take_values(*result);
      });
      return compiler::result_of(std::move(result), call);
    }
  }

  F step_;
  std::shared_ptr<compiler::StepCache> cache_;
  std::shared_ptr<optim::detail::SubstituteOptimizers> substitutes_ =
      std::make_shared<optim::detail::SubstituteOptimizers>();
};

// Compiles a training step, or any function of tensors. Its arguments may be modules, optimizers of tessera::optim and
// torch::optim (except LBFGS), tensors, tuples, structs with tessera_visit, and numbers. It may run forward, backward,
// gradient clipping, optimizer steps and collectives.
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
// Returned tensors do not require gradients. Learning rates, step counts, random numbers, and numbers of type double
// among the arguments are read on every call. If the step computes with a number on the host (arithmetic, a comparison,
// a size), it is a constant of the program, and another value recompiles; so do other integers, enums and strings.
//
// The step must not depend on anything else that changes between calls. See live() for captured variables. A function
// object with tessera_visit lists its members, which are inputs or keys as arguments are. A step can
// also read global variables, and hooks have variables of their own, so calls 2, 4, 8, ... trace it again. A step that
// captures anything also runs in eager mode and compiled from the same state, on calls 1, 2, 4, 8, ... A difference is
// an error that names the first op, or tensor, that differs.
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
  CompiledModule(H module, const CompileOptions& options) : module_(std::move(module)) {
    auto settings = compiler::settings_from(options);
    TESSERA_CHECK(settings.load.empty(), UsageError,
                  "load: compile(module) has no saved form; compile a step that calls the module");
    settings.attempt.function = compiler::function_key(typeid(H).name());
    cache_ = std::make_shared<compiler::ModuleCache>(std::move(settings));
  }

  // Calls forward by its program. backward() of the results runs the backward program.
  template <class... Args>
  auto operator()(Args&&... args) {
    using Result = std::remove_cvref_t<decltype(module_(args...))>;
    static_assert(can_visit<Result>,
                  "compile: the result type needs tessera_visit, which lists its tensors (base/visit.h)");
    if (compiling()) return static_cast<Result>(module_(args...));
    const compiler::OneCaller::Scope calls(cache_->caller());
    compiler::CallArguments arguments;
    arguments.add(module_);
    (arguments.add(args), ...);
    std::optional<Result> result;
    const auto call = cache_->call(arguments, [&](const std::vector<double>* numbers) {
      result.emplace(compiler::call_with_numbers(module_, numbers, args...));
      return compiler::take_values(*result);
    });
    return compiler::result_of(std::move(result), call);
  }

  // The module that was compiled. Parameters are shared with it.
  H& orig_mod() { return module_; }
  // Members of the module that was compiled: compiled->parameters().
  auto* operator->() { return module_.get(); }
  auto& operator*() { return *module_; }
  // The programs that are cached, one per set of guards: compiled.cache().size().
  const compiler::ModuleCache& cache() const { return *cache_; }
  // Why each compilation after the first was necessary.
  const std::vector<std::string>& recompiles() const { return cache_->recompiles(); }

 private:
  H module_;
  std::shared_ptr<compiler::ModuleCache> cache_;
};

// Compiles a module holder: forward and backward become two programs, the rest of the module is unchanged.
//
//   auto compiled = compile(model);
//   auto loss = compiled(x).sum();
//   loss.backward();
//
// Numbers of type double among the arguments are read on every call. Members of the module and of its submodules are
// guarded: another value recompiles. If a member has elements on the heap (a std::vector), calls 1, 2, 4, 8, ... are
// checked against eager mode, as those of a step with captured variables.
template <class H>
requires std::is_base_of_v<torch::detail::ModuleHolderIndicator, H> CompiledModule<H> compile(
    H module, const CompileOptions& options = {}) {
  return CompiledModule<H>(std::move(module), options);
}

}  // namespace tessera
