#include "tessera/compile/api/compile_backward.h"

#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/compile/api/counters.h"
#include "tessera/compile/detail/api/step_program.h"
#include "tessera/compile/detail/backward/backward_graph.h"

#include <atomic>

namespace tessera {
namespace {

constexpr size_t kMaxBackwardPrograms = 32;  // per thread

compiler::ProgramCache<compiler::StepProgram>& backward_cache() {
  thread_local compiler::ProgramCache<compiler::StepProgram> it;
  return it;
}

// The part of the cache key that depends on the options. Runners cannot be compared, so a scope with a runner does not
// share its programs.
std::string options_key(const compiler::Settings& settings) {
  static std::atomic<int64_t> runners{0};
  std::string key = settings.backend + (settings.codegen ? " codegen" : "");
  if (settings.run_with) key += c10::str(" runner ", runners++);
  for (const auto& pass : settings.passes) key += " " + pass.name;
  return key;
}

// Eager backward delivers gradients one by one; the backward of a compiled forward delivers all at once.
// hoist_communication moves the work of gradient hooks to where each gradient is computed, so that buckets fill during
// backward.
compiler::Settings backward_settings(const CompileOptions& options) {
  auto settings = compiler::settings_from(options);
  if (settings.reorder) settings.passes.insert(settings.passes.begin(), compiler::find_pass("hoist_communication"));
  return settings;
}

}  // namespace

class CompiledBackwardScope::Impl {
 public:
  explicit Impl(const CompileOptions& options)
      : settings_(backward_settings(options)),
        options_key_(options_key(settings_)),
        scope_([this](const detail::BackwardCall& call) { return run(call); }) {}

  const std::vector<std::shared_ptr<const compiler::Executable>>& programs() const { return programs_; }

 private:
  torch::autograd::variable_list run(const detail::BackwardCall& call);

  compiler::Settings settings_;
  compiler::UnmatchedPasses unmatched_passes_;
  std::string options_key_;
  std::vector<std::shared_ptr<const compiler::Executable>> programs_;
  detail::BackwardScope scope_;
};

torch::autograd::variable_list CompiledBackwardScope::Impl::run(const detail::BackwardCall& call) {
  auto graph = compiler::read_backward_graph(call);
  if (call.create_graph) graph.unsupported = "create_graph = true needs an autograd graph of the backward";
  if (!graph.unsupported.empty()) {
    TESSERA_CHECK(!settings_.fullgraph, UsageError,
                  "compile_backward: this backward cannot be compiled: ", graph.unsupported);
    warn_once("compile_backward/" + graph.unsupported,
              "compile_backward: a backward falls back to eager, because " + graph.unsupported);
    return call.run(call.keep_graph);
  }
  compiler::CallArguments arguments;
  arguments.program_name = "backward";
  arguments.leaves = graph.leaves;
  arguments.tensors = graph.saved;
  arguments.strings = {graph.key, options_key_};
  auto program = backward_cache().find(arguments, compiler::ThreadState::now());
  if (!program) {
    program = std::make_shared<compiler::StepProgram>(
        arguments,
        [&](const std::vector<double>*) {
          return compiler::TracedResult{call.run(true), {}};
        },
        settings_, true);
    unmatched_passes_.check(program->report(), settings_);
    backward_cache().insert(program, kMaxBackwardPrograms);
  }
  programs_.emplace_back(program, &program->executable());
  auto returned = program->run(arguments).tensors;
  if (!call.keep_graph) compiler::release_saved_tensors(graph);
  return returned;
}

CompiledBackwardScope::CompiledBackwardScope(const CompileOptions& options) : impl_(std::make_unique<Impl>(options)) {}
CompiledBackwardScope::~CompiledBackwardScope() = default;

const std::vector<std::shared_ptr<const compiler::Executable>>& CompiledBackwardScope::programs() const {
  return impl_->programs();
}

void reset_compile_caches() {
  backward_cache().clear();
  counters().clear();
}

}  // namespace tessera
