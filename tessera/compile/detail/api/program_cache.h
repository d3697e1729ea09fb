#pragma once
#include "tessera/base/error.h"
#include "tessera/compile/detail/api/compile_settings.h"
#include "tessera/compile/detail/api/recompile_agreement.h"
#include "tessera/compile/detail/api/result_leaves.h"
#include "tessera/compile/detail/api/result_prototype.h"
#include "tessera/compile/detail/api/signature.h"
#include "tessera/compile/detail/ir/program_agreement.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace tessera::compiler {

// The result of one run of the user's function.
struct TracedResult {
  Tensors tensors;
  ResultLeaves leaves;
};
// The user's function with the arguments of one call.
// `numbers`: if not null, replace the numbers of the call (CallArguments::numbers), to find out what they are used for.
using TracedFunction = std::function<TracedResult(const std::vector<double>* numbers)>;

// The values of a result. Its tensors become undefined, so that nothing but a program keeps their memory.
template <class Result>
TracedResult take_values(Result& result) {
  TracedResult values{tensors_of(result), leaves_of(result)};
  assign_tensors(result, Tensors(values.tensors.size()));
  return values;
}

// What one run of a program returns.
struct Returned {
  Tensors tensors;
  std::vector<double> numbers = {};
};

// What one call of a compiled function has returned.
struct CallResult {
  Returned returned;
  ResultPrototype* prototype = nullptr;  // of the program that ran; null: the function ran in eager mode
};

// The result of a call: `made` is the one that the function has returned, if this call has run it.
template <class Result>
Result result_of(std::optional<Result> made, const CallResult& call) {
  if (call.prototype) return call.prototype->with_values(std::move(made), call.returned.tensors, call.returned.numbers);
  assign_tensors(*made, call.returned.tensors);
  return std::move(*made);
}

// Compiled programs, the most recently used first. Program is StepProgram or ModuleProgram.
template <class Program>
class ProgramCache {
 public:
  // The program whose guards hold for this call, which becomes the first; null on a cache miss.
  std::shared_ptr<Program> find(const CallArguments& arguments, const ThreadState& now) {
    for (auto each = programs_.begin(); each != programs_.end(); each++) {
      if (!(*each)->fits_and_remember(arguments, now)) continue;
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
    // On a cache miss: the program of a file, or null and the reason why it does not fit ("": no file was given).
    std::function<std::shared_ptr<Program>(std::string& why)> find_loaded = {};
  };

  CallResult call(const CallArguments& arguments, const Settings& settings, const TracedFunction& function,
                  const Policy& policy) {
    const auto now = ThreadState::now();
    auto hit = cache_.find(arguments, now);
    const auto is_known = [&](const Signature& failed) { return failed.holds(arguments, now); };
    bool runs_eager = !hit && std::any_of(not_compilable_.begin(), not_compilable_.end(), is_known);
    std::string agreed_reason;
    if (settings.agree_every_call) {
      const auto all = static_cast<CallKind>(largest_of_ranks(static_cast<int64_t>(runs_eager ? CallKind::Eager
                                                                                   : hit      ? CallKind::Hit
                                                                                              : CallKind::Miss)));
      if (all != CallKind::Hit && hit) agreed_reason = "another rank recompiles", hit = nullptr;
      if (all == CallKind::Eager && !runs_eager) {
        if (warned_.insert("of another rank").second)
          TORCH_WARN("compile: the ", policy.what, " falls back to eager, because another rank does");
        return run_eager(function);
      }
    }
    if (hit) return call_program(*hit, arguments, settings, function, policy);
    if (runs_eager) {
      if (!std::exchange(eager_is_published_, true)) publish_failure(attempt_, last_failure_, true);
      return run_eager(function);
    }
    std::string why_not_loaded;
    if (policy.find_loaded && agreed_reason.empty()) {
      if (auto loaded = policy.find_loaded(why_not_loaded)) {
        cache_.insert(loaded, settings.cache_size);
        return call_program(*loaded, arguments, settings, function, policy);
      }
    }
    note_recompile(arguments, now, settings, policy, agreed_reason, why_not_loaded);
    if (policy.before_compile) policy.before_compile();
    if (!last_failure_.empty()) withdraw_failure(attempt_);
    eager_is_published_ = false;
    attempt_ = {settings.attempt.function, attempt_.number + 1};
    std::shared_ptr<Program> program;
    try {
      TESSERA_CHECK(
          recompiles_.size() <= settings.recompile_limit, UsageError, "compile: the ", policy.what, " was compiled ",
          recompiles_.size(), " times, which is CompileOptions::recompile_limit. The last reason: ",
          recompiles_.empty() ? "" : recompiles_.back(), ". Make that equal in all calls, or raise the limit");
      auto compile_settings = settings;
      compile_settings.attempt = attempt_;
      if (!recompiles_.empty()) compile_settings.recompiled_because = recompiles_.back();
      program = std::make_shared<Program>(arguments, function, compile_settings);
    } catch (const std::exception& error) {
      last_failure_ = message_of(error);
      publish_failure(attempt_, last_failure_, false);
      if (!policy.fall_back) throw;
      return fall_back(error, arguments, function, policy);
    }
    unmatched_passes_.check(program->report(), settings);
    cache_.insert(program, settings.cache_size);
    return call_program(*program, arguments, settings, function, policy);
  }

  const std::vector<std::shared_ptr<Program>>& programs() const { return cache_.programs(); }
  // Why each compilation after the first was necessary.
  const std::vector<std::string>& recompiles() const { return recompiles_; }

 private:
  enum class CallKind : uint8_t { Hit, Miss, Eager };

  static CallResult run_eager(const TracedFunction& function) { return {{function(nullptr).tensors}, nullptr}; }
  CallResult call_program(Program& program, const CallArguments& arguments, const Settings& settings,
                          const TracedFunction& function, const Policy& policy) {
    const auto with_peers = [&](const auto& call) -> CallResult {
      try {
        return call();
      } catch (const std::exception& error) {
        end_with_peers(program, error);
        throw;
      }
    };
    std::optional<Returned> checked;
    with_peers([&] {
      checked = program.check_if_due(arguments, function, settings);
      return CallResult();
    });
    if (checked) return {std::move(*checked), &program.prototype()};
    const auto run = [&]() -> CallResult { return {program.run(arguments), &program.prototype()}; };
    // A rank cannot fall back alone in the middle of a program: its collectives would meet others of its peers.
    if (!policy.fall_back || has_peers(program.executable().program())) return with_peers(run);
    auto before = program.save_before_run(arguments);
    try {
      return run();
    } catch (const std::exception& error) {
      before.restore();
      return fall_back(error, arguments, function, policy);
    }
  }
  // An error has ended a call of a program: all its peers end too. Adds which peer did not run its program.
  static void end_with_peers(Program& program, const std::exception& error) {
    const auto& ran = program.executable().program();
    if (!has_peers(ran)) return;
    const auto peers = announcements_of_peers(ran);
    TESSERA_CHECK(peers.empty(), UsageError, peers, message_of(error));
    if (!is_communication_error(error)) announce(Announcement::Stops, ran, message_of(error));
  }
  // Runs the function in eager mode, now and in later calls like this one. Warns once per reason.
  CallResult fall_back(const std::exception& error, const CallArguments& arguments, const TracedFunction& function,
                       const Policy& policy) {
    const auto reason = message_of(error);
    if (warned_.insert(reason).second) {
      TORCH_WARN("compile: the ", policy.what, " falls back to eager: ", reason);
    }
    if (not_compilable_.size() >= kMaxNotCompilable) not_compilable_.erase(not_compilable_.begin());
    not_compilable_.emplace_back(arguments, std::vector<bool>(arguments.numbers.size(), false));
    return run_eager(function);
  }
  void note_recompile(const CallArguments& arguments, const ThreadState& now, const Settings& settings,
                      const Policy& policy, const std::string& agreed_reason, const std::string& why_not_loaded) {
    const bool is_first = programs().empty();
    if (is_first && why_not_loaded.empty()) return;
    auto reason = !agreed_reason.empty() ? agreed_reason
                  : is_first             ? why_not_loaded
                                         : programs().front()->why_not(arguments, now);
    if (!settings.agree_every_call && !is_first)
      announce(Announcement::Recompiles, programs().front()->executable().program(), reason);
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
  CompileAttempt attempt_;        // the last one
  std::string last_failure_;
  bool eager_is_published_ = false;
  UnmatchedPasses unmatched_passes_;
};

}  // namespace tessera::compiler
