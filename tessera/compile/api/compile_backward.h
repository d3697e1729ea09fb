#pragma once
#include "tessera/compile/detail/api/compiled_step.h"
#include "tessera/nn/detail/engine.h"

#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace tessera {

// While alive, backward() on this thread runs as one program: what the graph's nodes do, adding to gradients, and hooks
// on them, a reducer's collectives among them. A graph of the same kind with the same leaves runs the program of
// before, also in another scope with the same options. What cannot be compiled (create_graph, saved-tensor hooks of
// before) runs as it is, and that is said once; with fullgraph it is an error.
//
//   auto scope = compile_backward({.passes = {{"fuse_ddp_with_coalesced_op", "schedule_comm_wait"}}});
//   loss.backward();
//   std::cout << scope.programs()[0]->listing();
//
// compile_backward(f) has backwards run by what f makes of them: f(program) gives a function that is called with a
// tensor for each of the program's inputs and returns its outputs (compiler::Runner).
class CompiledBackwardScope {
 public:
  explicit CompiledBackwardScope(const CompileOptions& options);
  CompiledBackwardScope(const CompiledBackwardScope&) = delete;

  // Those that ran in this scope, in order.
  const std::vector<std::shared_ptr<const compiler::Executable>>& programs() const { return programs_; }

 private:
  static compiler::Settings with_hoisting(compiler::Settings settings);
  torch::autograd::variable_list take(const detail::BackwardCall& call);

  compiler::Settings settings_;
  compiler::IdlePasses idle_;
  std::string words_;  // what the programs of this scope are kept under
  std::vector<std::shared_ptr<const compiler::Executable>> programs_;
  detail::BackwardScope scope_;
};
[[nodiscard]] inline CompiledBackwardScope compile_backward(const CompileOptions& options = {}) {
  return CompiledBackwardScope(options);
}

template <class F>
requires std::is_invocable_r_v<compiler::Runner, F&, const compiler::Program&>
[[nodiscard]] CompiledBackwardScope compile_backward(F make_runner, CompileOptions options = {}) {
  options.run_with = compiler::MakeRunner(std::move(make_runner));
  return CompiledBackwardScope(options);
}

// Forgets all programs that compile_backward has made on this thread, and the counters.
void reset_compile_caches();

}  // namespace tessera
