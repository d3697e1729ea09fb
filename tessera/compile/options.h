#pragma once
#include "tessera/compile/data_parallel.h"
#include "tessera/compile/passes/pass.h"
#include "tessera/compile/report/trace.h"

#include <optional>
#include <string>
#include <vector>

namespace tessera {

// A pass by its name, or one of yours: a callable that rewrites the program and says how often it matched.
struct PassChoice : compiler::Pass {
  PassChoice(const char* name) : Pass(compiler::find_pass(name)) {}         // NOLINT(google-explicit-constructor)
  PassChoice(const std::string& name) : Pass(compiler::find_pass(name)) {}  // NOLINT(google-explicit-constructor)
  PassChoice(compiler::Pass pass) : Pass(std::move(pass)) {}                // NOLINT(google-explicit-constructor)
};
using PassList = std::vector<PassChoice>;

// What is not given is as the innermost CompileScope says, else as stated.
struct CompileOptions {
  std::optional<DataParallel> parallel_mode = {};  // of a step: it is cut over ranks
  std::optional<PassList> passes = {};             // in this order; not given: default_passes()
  std::optional<bool> codegen = {};                // pointwise kernels are generated; on
  std::optional<bool> fullgraph = {};              // what cannot be compiled is an error; off: it runs as it is; on
  std::optional<std::string> backend = {};         // "tessera"; "eager": nothing is compiled
  std::optional<bool> verified = {};               // the program is checked after every pass; off
  std::optional<size_t> cache_size = {};           // programs for different arguments that are kept; 8
  // Is told every program that is compiled, pass by pass; not given: pages are written where TESSERA_TRACE_DIR says.
  std::optional<compiler::TraceSink> trace = {};
};

// While alive, the defaults of compile and compile_backward on this thread.
class CompileScope {
 public:
  explicit CompileScope(CompileOptions options);
  ~CompileScope();
  CompileScope(const CompileScope&) = delete;

 private:
  CompileOptions before_;
};

namespace compiler {

// Everything decided.
struct Settings {
  std::optional<DataParallel> parallel_mode;
  std::vector<Pass> passes;
  bool codegen, fullgraph, verified;
  std::string backend;
  size_t cache_size;
  TraceSink trace;  // null: nobody wants to know
};
Settings settings_from(const CompileOptions& options);
PassList default_passes();

}  // namespace compiler
}  // namespace tessera
