#include "tessera/compile/api/compile_backward.h"

#include "tessera/base/error.h"
#include "tessera/base/detail/warn_once.h"
#include "tessera/compile/detail/backward/graph.h"
#include "tessera/compile/api/counters.h"

#include <algorithm>
#include <atomic>

namespace tessera {
namespace {

using compiler::CompiledProgram;

constexpr size_t kPrograms = 32;  // kept, of a thread

std::vector<std::shared_ptr<CompiledProgram>>& programs_of_thread() {
  thread_local std::vector<std::shared_ptr<CompiledProgram>> it;
  return it;
}

// Two runners cannot be compared: each scope with one keeps programs of its own.
std::string words_of(const compiler::Settings& settings) {
  static std::atomic<int64_t> runners{0};
  std::string words = settings.backend + (settings.codegen ? " codegen" : "");
  if (settings.run_with) words += c10::str(" runner ", runners++);
  for (const auto& pass : settings.passes) words += " " + pass.name;
  return words;
}

}  // namespace

CompiledBackwardScope::CompiledBackwardScope(const CompileOptions& options)
    : settings_(with_hoisting(compiler::settings_from(options))),
      words_(words_of(settings_)),
      scope_([this](const detail::BackwardCall& call) { return take(call); }) {}

// Autograd adds to gradients as they come; behind a compiled forward they come all at once. What hooks do with each
// goes to where it is there, so that buckets fill while backward goes on.
compiler::Settings CompiledBackwardScope::with_hoisting(compiler::Settings settings) {
  if (settings.reorder) settings.passes.insert(settings.passes.begin(), compiler::find_pass("hoist_communication"));
  return settings;
}

torch::autograd::variable_list CompiledBackwardScope::take(const detail::BackwardCall& call) {
  auto graph = compiler::read_graph(call);
  if (call.create_graph) graph.refused = "create_graph asks for a graph of the backward";
  if (!graph.refused.empty()) {
    TESSERA_CHECK(!settings_.fullgraph, UsageError,
                  "compile_backward: this backward cannot be compiled: ", graph.refused);
    warn_once("compile_backward/" + graph.refused,
              "compile_backward: a backward runs as it is, because " + graph.refused);
    return call.run(call.keep_graph);
  }
  compiler::Arguments arguments;
  arguments.what = "backward";
  arguments.leaves = graph.leaves;
  arguments.tensors = graph.saved;
  arguments.words = {graph.key, words_};
  const auto signature = compiler::signature_of(arguments);
  auto& programs = programs_of_thread();
  auto found = std::find_if(programs.begin(), programs.end(),
                            [&](const auto& program) { return program->fits(arguments, signature); });
  if (found == programs.end()) {
    auto made = std::make_shared<CompiledProgram>(
        arguments, [&] { return call.run(true); }, settings_, true);
    idle_.look_at(made->report(), settings_);
    if (programs.size() == kPrograms) programs.pop_back();
    found = programs.insert(programs.begin(), std::move(made));
  }
  const auto program = *found;
  std::rotate(programs.begin(), found, found + 1);
  programs_.emplace_back(program, &program->executable());
  auto returned = program->run(arguments);
  if (!call.keep_graph) compiler::release(graph);
  return returned;
}

void reset_compile_caches() {
  programs_of_thread().clear();
  counters().clear();
}

}  // namespace tessera
