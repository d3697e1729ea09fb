#pragma once
#include "tessera/base/error.h"
#include "tessera/compile/detail/api/compile_settings.h"
#include "tessera/compile/detail/api/recompile_agreement.h"
#include "tessera/compile/detail/api/result_prototype.h"
#include "tessera/compile/detail/api/signature.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace tessera::compiler {

// The user's function with the arguments of one call; returns the tensors of its result.
// `numbers`: if not null, replace the numbers of the call (CallArguments::numbers), to find out what they are used for.
using TracedFunction = std::function<Tensors(const std::vector<double>* numbers)>;

// What one call of a compiled function has returned.
struct CallResult {
  Tensors tensors;
  ResultPrototype* prototype = nullptr;  // of the program that ran; null: the function ran in eager mode
};

// The result of a call: `made` is the one that the function has returned, if this call has run it.
template <class Result>
Result result_of(std::optional<Result> made, const CallResult& call) {
  if (call.prototype) return call.prototype->with_tensors(std::move(made), call.tensors);
  assign_tensors(*made, call.tensors);
  return std::move(*made);
}

// Compiled programs, the most recently used first. Program is StepProgram or ModuleProgram.
template <class Program>
class ProgramCache {
 public:
  // The program whose guards hold for this call, which becomes the first; null on a cache miss.
  std::shared_ptr<Program> find(const CallArguments& arguments, const ThreadState& now) {
    for (auto each = programs_.begin(); each != programs_.end(); each++) {
      if (!(*each)->fits(arguments, now)) continue;
      if (each != programs_.begin()) std::rotate(programs_.begin(), each, each + 1);
      return programs_.front();
    }
    return nullptr;
  }
  // Evicts the least recently used program if there are `capacity` already.
  void insert(std::shared_ptr<Program> program, size_t capacity) {
    if (programs_.size() >= capacity) programs_.pop_back();
    programs_.insert(programs_.begin(), std::move(program));
  }
  const std::vector<std::shared_ptr<Program>>& programs() const { return programs_; }
  void clear() { programs_.clear(); }

 private:
  std::vector<std::shared_ptr<Program>> programs_;
};

// All programs of one compiled function. A call is a cache hit, a compilation, or falls back to eager.
template <class Program>
class FunctionCache {
 public:
  struct Policy {
    const char* what;       // "step" or "module", for messages
    bool fall_back = true;  // to eager, if the function cannot be compiled; false: the error is thrown
    std::function<void()> before_compile = {};  // on a cache miss
  };

  CallResult call(const CallArguments& arguments, const Settings& settings, const TracedFunction& function,
                  const Policy& policy) {
    const auto now = ThreadState::now();
    auto hit = cache_.find(arguments, now);
    std::string agreed_reason;
    if (settings.agree_every_call && any_rank(!hit) && hit) {
      hit = nullptr;
      agreed_reason = "another rank recompiles";
    }
    if (hit) {
      hit->check_again_if_due(arguments, function, settings);
      return run(*hit, arguments, function, policy);
    }
    const auto is_known = [&](const Signature& failed) { return failed.holds(arguments, now); };
    if (std::any_of(not_compilable_.begin(), not_compilable_.end(), is_known)) return {function(nullptr), nullptr};
    note_recompile(arguments, now, settings, policy, agreed_reason);
    if (policy.before_compile) policy.before_compile();
    std::shared_ptr<Program> program;
    try {
      TESSERA_CHECK(
          recompiles_.size() <= settings.recompile_limit, UsageError, "compile: the ", policy.what, " was compiled ",
          recompiles_.size(), " times, which is CompileOptions::recompile_limit. The last reason: ",
          recompiles_.empty() ? "" : recompiles_.back(), ". Make that equal in all calls, or raise the limit");
      auto compile_settings = settings;
      if (!programs().empty()) compile_settings.recompiled_because = recompiles_.back();
      program = std::make_shared<Program>(arguments, function, compile_settings);
    } catch (const std::exception& error) {
      if (!policy.fall_back) throw;
      return fall_back(error, arguments, function, policy);
    }
    unmatched_passes_.check(program->report(), settings);
    cache_.insert(program, settings.cache_size);
    return run(*program, arguments, function, policy);
  }

  const std::vector<std::shared_ptr<Program>>& programs() const { return cache_.programs(); }
  // Why each compilation after the first was necessary.
  const std::vector<std::string>& recompiles() const { return recompiles_; }

 private:
  CallResult run(Program& program, const CallArguments& arguments, const TracedFunction& function,
                 const Policy& policy) {
    if (!policy.fall_back) return run_with_peers(program, arguments);
    auto restore = program.save_before_run(arguments);
    try {
      return {program.run(arguments), &program.prototype()};
    } catch (const std::exception& error) {
      restore();
      return fall_back(error, arguments, function, policy);
    }
  }
  // Adds to an error of communication which peer recompiles instead of running its program.
  static CallResult run_with_peers(Program& program, const CallArguments& arguments) {
    try {
      return {program.run(arguments), &program.prototype()};
    } catch (const std::exception& error) {
      const auto peers = recompiles_of_peers(program.executable().program());
      if (peers.empty()) throw;
      const auto* known = dynamic_cast<const c10::Error*>(&error);
      TESSERA_FAIL(UsageError, peers, known ? known->what_without_backtrace() : error.what());
    }
  }
  // Runs the function in eager mode, now and in later calls like this one. Warns once per reason.
  CallResult fall_back(const std::exception& error, const CallArguments& arguments, const TracedFunction& function,
                       const Policy& policy) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    const std::string reason = torch_error ? torch_error->what_without_backtrace() : error.what();
    if (warned_.insert(reason).second) {
      TORCH_WARN("compile: the ", policy.what, " falls back to eager: ", reason);
    }
    if (not_compilable_.size() >= kMaxNotCompilable) not_compilable_.erase(not_compilable_.begin());
    not_compilable_.emplace_back(arguments, std::vector<bool>(arguments.numbers.size(), false));
    return {function(nullptr), nullptr};
  }
  void note_recompile(const CallArguments& arguments, const ThreadState& now, const Settings& settings,
                      const Policy& policy, const std::string& agreed_reason) {
    if (programs().empty()) return;
    auto reason = agreed_reason.empty() ? programs().front()->why_not(arguments, now) : agreed_reason;
    if (!settings.agree_every_call) announce_recompile(programs().front()->executable().program(), reason);
    if (warned_.insert(reason).second) {
      TORCH_WARN("compile: the ", policy.what, " is recompiled, because ", reason, "; at most ", settings.cache_size,
                 " programs are cached");
    }
    recompiles_.push_back(std::move(reason));
  }

  static constexpr size_t kMaxNotCompilable = 64;
  ProgramCache<Program> cache_;
  std::vector<Signature> not_compilable_;  // calls that fall back to eager
  std::vector<std::string> recompiles_;
  std::set<std::string> warned_;  // reasons
  UnmatchedPasses unmatched_passes_;
};

}  // namespace tessera::compiler
