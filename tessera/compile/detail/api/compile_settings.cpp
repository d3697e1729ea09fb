#include "tessera/compile/detail/api/compile_settings.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace tessera {
namespace {

constexpr const char* kCompileBackends[] = {"tessera", "eager"};

CompileOptions& scope_defaults() {
  thread_local CompileOptions it;
  return it;
}

// The fields of `a`; where one is not given, that of `b`.
CompileOptions merge_options(const CompileOptions& a, const CompileOptions& b) {
  const auto first = [](const auto& x, const auto& y) { return x ? x : y; };
  return {first(a.parallel_mode, b.parallel_mode),
          first(a.passes, b.passes),
          first(a.codegen, b.codegen),
          first(a.fullgraph, b.fullgraph),
          first(a.backend, b.backend),
          first(a.verified, b.verified),
          first(a.cache_size, b.cache_size),
          first(a.reorder, b.reorder),
          first(a.strict_passes, b.strict_passes),
          first(a.run_with, b.run_with),
          first(a.trace, b.trace),
          first(a.check, b.check),
          first(a.recompile_limit, b.recompile_limit),
          first(a.captures, b.captures),
          first(a.agree, b.agree),
          first(a.numerics, b.numerics),
          first(a.split_backward, b.split_backward),
          first(a.load, b.load)};
}

Numerics default_numerics() {
  const auto text = setting("TESSERA_NUMERICS");
  TESSERA_CHECK(text == "strict" || text == "fast", UsageError, "TESSERA_NUMERICS is \"", text,
                "\"; write strict or fast");
  return text == "strict" ? Numerics::Strict : Numerics::Fast;
}

}  // namespace

CompileScope::CompileScope(CompileOptions options) : before_(scope_defaults()) {
  scope_defaults() = merge_options(options, before_);
}
CompileScope::~CompileScope() { scope_defaults() = before_; }

namespace compiler {

Settings settings_from(const CompileOptions& options) {
  const auto all = merge_options(options, scope_defaults());
  Settings settings{all.parallel_mode,
                    {},
                    all.codegen.value_or(true),
                    all.fullgraph.value_or(true),
                    all.verified.value_or(false),
                    all.backend.value_or("tessera"),
                    all.cache_size.value_or(8),
                    all.passes.has_value(),
                    all.strict_passes.value_or(false),
                    all.reorder.value_or(true),
                    all.run_with.value_or(nullptr),
                    all.trace.value_or(nullptr),
                    all.check.value_or(0),
                    all.recompile_limit.value_or(64),
                    all.agree.value_or(Agree::OnError) == Agree::EveryCall,
                    all.numerics.value_or(default_numerics()),
                    all.split_backward.value_or(false),
                    all.captures.value_or(Captures::Checked) == Captures::None};
  settings.load = all.load.value_or("");
  if (!all.trace && setting_is_set("TESSERA_TRACE_DIR")) settings.trace = trace_into(setting("TESSERA_TRACE_DIR"));
  for (const auto& pass : all.passes ? *all.passes : default_passes())
    if (settings.reorder || !pass.reorders) settings.passes.push_back(pass);
  TESSERA_CHECK(std::find(std::begin(kCompileBackends), std::end(kCompileBackends), settings.backend) !=
                    std::end(kCompileBackends),
                UsageError, "compile: backend is \"", settings.backend, "\"; write \"tessera\" or \"eager\"");
  TESSERA_CHECK(settings.cache_size > 0, UsageError, "compile: cache_size is 0; write at least 1");
  return settings;
}

PassList default_passes() {
  return {"fold_views",          "common_subexpressions",
          "fold_casts",          "dead_code",
          "hoist_communication", "fuse_ddp_with_concat_op",
          "schedule_comm_wait",  "fuse_bias",
          "cublas_epilogues",    "cuda_kernels"};
}

void UnmatchedPasses::check(const std::vector<PassReport>& report, const Settings& settings) {
  if (!settings.passes_were_given) return;
  std::map<std::string, int64_t> matches;
  for (const auto& each : report) matches[each.name] += each.matched.times;
  std::vector<std::string> unmatched;
  for (const auto& pass : settings.passes) {
    const auto ran = matches.find(pass.name);
    if (ran != matches.end() && ran->second == 0 && !warned_.count(pass.name)) unmatched.push_back(pass.name);
  }
  if (unmatched.empty()) return;
  const auto names = c10::Join(", ", unmatched);
  TESSERA_CHECK(!settings.strict_passes, UsageError, "compile: CompileOptions::passes has ", names,
                ", which matched nothing; remove it, or set strict_passes to false");
  warned_.insert(unmatched.begin(), unmatched.end());
  TORCH_WARN("compile: passes that were asked for and matched nothing: ", names);
}

}  // namespace compiler
}  // namespace tessera
