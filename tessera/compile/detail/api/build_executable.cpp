#include "tessera/compile/detail/api/build_executable.h"

#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/lower.h"
#include "tessera/compile/detail/ir/program_agreement.h"
#include "tessera/compile/detail/passes/pass.h"
#include "tessera/compile/detail/passes/pass_observer.h"
#include "tessera/compile/detail/report/compile_trace.h"
#include "tessera/tracing/detail/invariant_scope.h"

#include <iterator>

namespace tessera::compiler {

std::unique_ptr<Executable> build_executable(Program program, const char* name, const Settings& settings,
                                             std::vector<PassReport>& report,
                                             const std::function<std::vector<c10::Storage>(const Program&)>& bind,
                                             Program* before_lowering) {
  for (const auto& pass : invariant_scope_is_open() ? known_passes() : std::vector<PassInfo>())
    for (const auto& given : settings.passes)
      TESSERA_CHECK(!pass.is_fast_only || !given.name.starts_with(pass.name), UsageError, "compile: the pass ",
                    given.name, " changes the order of sums, which Numerics::Invariant does not allow; remove it");
  const auto append = [&](std::vector<PassReport> entries) {
    report.insert(report.end(), std::make_move_iterator(entries.begin()), std::make_move_iterator(entries.end()));
  };
  TraceRecorder record(settings.trace, name, program, settings.recompiled_because);
  append(run_passes(program, settings.passes, settings.verified));
  if (before_lowering) *before_lowering = program;
  append(lower(program, settings));
  const auto storages = bind(program);
  auto executable = std::make_unique<Executable>(std::move(program), storages, settings.run_with);
  agree_on(executable->program(), settings.attempt);  // last: nothing fails on one rank only after it
  record.finish(*executable);
  if (auto* observer = PassObserverScope::current()) observer->after_build();
  return executable;
}

std::vector<c10::Storage> shared_storages(const Program& program, std::vector<c10::Storage> traced) {
  auto shared = program.external_buffers();
  for (const auto& output : program.outputs)
    if (output.value != kNone && output.kind != Output::Kind::Return)
      shared[static_cast<size_t>(program.buffer_of(output.value))] = 1;
  traced.resize(shared.size());  // passes may have added buffers
  for (size_t b = 0; b < shared.size(); b++)
    if (!shared[b]) traced[b] = c10::Storage();
  return traced;
}

}  // namespace tessera::compiler
