#include "tessera/compile/api/options.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/settings.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <map>

namespace tessera {
namespace {

constexpr const char* kBackends[] = {"tessera", "eager"};

CompileOptions& defaults() {
  thread_local CompileOptions it;
  return it;
}

template <class T>
std::optional<T> first(const std::optional<T>& a, const std::optional<T>& b) {
  return a ? a : b;
}

CompileOptions over(const CompileOptions& a, const CompileOptions& b) {
  return {first(a.parallel_mode, b.parallel_mode), first(a.passes, b.passes),   first(a.codegen, b.codegen),
          first(a.fullgraph, b.fullgraph),         first(a.backend, b.backend), first(a.verified, b.verified),
          first(a.cache_size, b.cache_size),       first(a.reorder, b.reorder), first(a.strict_passes, b.strict_passes),
          first(a.run_with, b.run_with),           first(a.trace, b.trace)};
}

}  // namespace

CompileScope::CompileScope(CompileOptions options) : before_(defaults()) { defaults() = over(options, before_); }
CompileScope::~CompileScope() { defaults() = before_; }

compiler::Settings compiler::settings_from(const CompileOptions& options) {
  const auto all = over(options, defaults());
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
                    all.trace.value_or(nullptr)};
  if (!all.trace && setting_is_set("TESSERA_TRACE_DIR")) settings.trace = trace_into(setting("TESSERA_TRACE_DIR"));
  for (const auto& pass : all.passes ? *all.passes : default_passes())
    if (settings.reorder || !pass.reorders) settings.passes.push_back(pass);
  TESSERA_CHECK(std::find(std::begin(kBackends), std::end(kBackends), settings.backend) != std::end(kBackends),
                UsageError, "compile: there is no backend \"", settings.backend, "\"; write tessera or eager");
  TESSERA_CHECK(settings.cache_size > 0, UsageError, "compile: cache_size is 0; at least one program is kept");
  return settings;
}

PassList compiler::default_passes() {
  return {"fold_views",          "common_subexpressions",   "dead_code",
          "hoist_communication", "fuse_ddp_with_concat_op", "schedule_comm_wait"};
}

void compiler::IdlePasses::look_at(const std::vector<PassReport>& report, const Settings& settings) {
  if (!settings.asked_for_passes) return;
  std::map<std::string, int64_t> times;
  for (const auto& each : report) times[each.name] += each.matched.times;
  std::vector<std::string> idle;
  for (const auto& pass : settings.passes) {
    const auto ran = times.find(pass.name);
    if (ran != times.end() && ran->second == 0 && !said_.count(pass.name)) idle.push_back(pass.name);
  }
  if (idle.empty()) return;
  const auto names = c10::Join(", ", idle);
  TESSERA_CHECK(!settings.strict_passes, UsageError, "compile: ", names,
                " was asked for and matched nothing; leave it out, or strict_passes off");
  said_.insert(idle.begin(), idle.end());
  TORCH_WARN("compile: asked for and matched nothing: ", names);
}

}  // namespace tessera
