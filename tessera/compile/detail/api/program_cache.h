#pragma once
#include "tessera/base/error.h"
#include "tessera/compile/detail/api/cache_key.h"
#include "tessera/compile/detail/api/compile_settings.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

namespace tessera::compiler {

// Compiled programs, the most recently used first. Program is StepProgram or ModuleProgram.
template <class Program>
class ProgramCache {
 public:
  // The program whose guards hold for this call, which becomes the first; null on a cache miss.
  std::shared_ptr<Program> find(const CallArguments& arguments, const CacheKey& key) {
    const auto found = std::find_if(programs_.begin(), programs_.end(),
                                    [&](const auto& program) { return program->fits(arguments, key); });
    if (found == programs_.end()) return nullptr;
    std::rotate(programs_.begin(), found, found + 1);
    return programs_.front();
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
    std::function<void(const CacheKey&)> before_compile = {};  // on a cache miss
  };

  Tensors call(const CallArguments& arguments, const Settings& settings, const std::function<Tensors()>& eager,
               const Policy& policy) {
    const auto key = cache_key_of(arguments);
    if (const auto hit = cache_.find(arguments, key)) return hit->run(arguments);
    if (policy.before_compile) policy.before_compile(key);
    if (std::find(not_compilable_.begin(), not_compilable_.end(), key) != not_compilable_.end()) return eager();
    std::shared_ptr<Program> program;
    try {
      program = std::make_shared<Program>(arguments, eager, settings);
    } catch (const UsageError& error) {
      if (!policy.fall_back) throw;
      if (!std::exchange(warned_, true))
        TORCH_WARN("compile: the ", policy.what, " falls back to eager: ", error.what_without_backtrace());
      not_compilable_.push_back(key);
      return eager();
    }
    unmatched_passes_.check(program->report(), settings);
    cache_.insert(program, settings.cache_size);
    return program->run(arguments);
  }

  const std::vector<std::shared_ptr<Program>>& programs() const { return cache_.programs(); }

 private:
  ProgramCache<Program> cache_;
  std::vector<CacheKey> not_compilable_;  // calls that fall back to eager
  UnmatchedPasses unmatched_passes_;
  bool warned_ = false;
};

}  // namespace tessera::compiler
