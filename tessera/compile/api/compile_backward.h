#pragma once
#include "tessera/base/visit.h"
#include "tessera/compile/api/options.h"
#include "tessera/compile/detail/replay/interpret.h"

#include <memory>
#include <type_traits>
#include <vector>

namespace tessera {

// While it is alive, backward() on this thread is compiled, as with torch._dynamo.compiled_autograd.
// One program runs the nodes of the autograd graph, the accumulation into .grad, and hooks on gradients, including the
// collectives of a DDP reducer. A graph with the same nodes and leaves reuses its program, also in a later scope with
// the same options. Graphs that cannot be compiled (create_graph, saved-tensor hooks that ran in forward) fall back to
// eager with one warning; with fullgraph they are an error.
//
//   auto scope = compile_backward({.passes = {{"fuse_ddp_with_coalesced_op", "schedule_comm_wait"}}});
//   loss.backward();
//   std::cout << scope.programs()[0]->listing();
class CompiledBackwardScope {
 public:
  // Prefer compile_backward().
  explicit CompiledBackwardScope(const CompileOptions& options);
  ~CompiledBackwardScope();
  CompiledBackwardScope(const CompiledBackwardScope&) = delete;

  // The programs that ran in this scope, one entry per backward(), in order.
  const std::vector<std::shared_ptr<const compiler::Executable>>& programs() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Compiles backward() on this thread while the result is alive. See CompiledBackwardScope.
[[nodiscard]] inline CompiledBackwardScope compile_backward(const CompileOptions& options = {}) {
  return CompiledBackwardScope(options);
}

// The same with a custom runner: make_runner(program) returns a function from input tensors to output tensors, which
// runs the program in place of the built-in replay (CompileOptions::run_with).
//
//   auto scope = compile_backward([](const compiler::Program& program) {
//     return [program](const Tensors& inputs) { return compiler::interpret(program, inputs); };
//   });
template <class F>
requires std::is_invocable_r_v<compiler::Runner, F&, const compiler::Program&>
[[nodiscard]] CompiledBackwardScope compile_backward(F make_runner, CompileOptions options = {}) {
  options.run_with = compiler::MakeRunner(std::move(make_runner));
  return CompiledBackwardScope(options);
}

// Drops all programs that compile_backward() has cached on this thread, and clears the counters.
void reset_compile_caches();

}  // namespace tessera
