#pragma once
#include "tessera/compile/api/data_parallel.h"
#include "tessera/compile/detail/passes/pass.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/report/trace.h"

#include <optional>
#include <set>
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
  std::optional<bool> reorder = {};                // passes that move communication (hoist_communication,
                                                   // schedule_comm_wait, ...) are run; on
  std::optional<bool> strict_passes = {};          // one of `passes` that matches nothing is an error; off: it is said
                                                   // once for each compiled function
  std::optional<compiler::MakeRunner> run_with = {};  // what runs programs; not given: replay
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
  bool asked_for_passes, strict_passes;  // `passes` are not the default ones
  bool reorder;
  MakeRunner run_with;
  TraceSink trace;  // null: nobody wants to know
};
Settings settings_from(const CompileOptions& options);
PassList default_passes();

// Says of each pass that was asked for and matched nothing in any of a function's programs that it did, once.
class IdlePasses {
 public:
  // `report`: of all programs of one call. With strict_passes it is a UsageError.
  void look_at(const std::vector<PassReport>& report, const Settings& settings);

 private:
  std::set<std::string> said_;
};

}  // namespace compiler
}  // namespace tessera
