#pragma once
#include "tessera/compile/api/options.h"
#include "tessera/compile/detail/ir/program_agreement.h"

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace tessera::compiler {

// CompileOptions with all defaults filled in.
struct Settings {
  std::optional<DataParallel> parallel_mode;
  std::vector<Pass> passes;
  bool codegen, fullgraph, verified;
  std::string backend;
  size_t cache_size;
  bool passes_were_given;  // by the user; otherwise `passes` are the default ones
  bool strict_passes;
  bool reorder;
  MakeRunner run_with;
  TraceSink trace;  // null: no compile trace is recorded
  int64_t check;    // the first calls are checked by another trace
  size_t recompile_limit;
  bool agree_every_call;
  Numerics numerics;
  bool split_backward;
  bool captures_none;                   // the user says that the function captures nothing that changes
  bool has_captures = false;            // the function captures variables
  bool widens_bfloat16 = true;          // with Numerics::Fast; false: checks cannot measure the error of roundings
  std::string load = {};                // file of a saved step; "": none
  std::string recompiled_because = {};  // for the compile trace; set for one compilation
  CompileAttempt attempt = {};          // the function, and its compilations so far
};

// Fills in what is not given: first from the innermost CompileScope, then from the documented defaults.
Settings settings_from(const CompileOptions& options);

// The passes that run if CompileOptions::passes is not given.
PassList default_passes();

// Warns once about each pass that the user asked for and that matched nothing. One object per compiled function.
class UnmatchedPasses {
 public:
  // `report`: the passes of all programs of one compilation. UsageError with strict_passes.
  void check(const std::vector<PassReport>& report, const Settings& settings);

 private:
  std::set<std::string> warned_;
};

}  // namespace tessera::compiler
