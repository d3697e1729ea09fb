#pragma once
#include "tessera/compile/api/data_parallel.h"
#include "tessera/compile/detail/passes/pass.h"
#include "tessera/compile/detail/replay/executable.h"
#include "tessera/compile/detail/report/compile_trace.h"
#include "tessera/numerics/numerics.h"

#include <optional>
#include <string>
#include <vector>

// Options of compile() and compile_backward(), the counterpart of the arguments of torch.compile.
//
//   auto step = compile(train_step, {.passes = PassList{"dead_code", "merge_collectives(bytes=1048576)"},
//                                    .fullgraph = false});
namespace tessera {

// One pass of the compiler: a built-in pass by name, or your own.
//
//   PassChoice{"fold_views"}
//   PassChoice{"merge_collectives(bytes=26214400)"}                   // a built-in pass with settings
//   PassChoice{compiler::Pass{"mine", [](compiler::Program& p) { ...; return compiler::Matched{times}; }}}
//
// UsageError if the name is unknown; the message lists the names.
struct PassChoice : compiler::Pass {
  // A built-in pass by name, with or without settings.
  PassChoice(const char* name) : Pass(compiler::find_pass(name)) {}         // NOLINT(google-explicit-constructor)
  PassChoice(const std::string& name) : Pass(compiler::find_pass(name)) {}  // NOLINT(google-explicit-constructor)
  // Your own pass.
  PassChoice(compiler::Pass pass) : Pass(std::move(pass)) {}  // NOLINT(google-explicit-constructor)
};

// Passes in the order in which they run: PassList{"fold_views", "dead_code"}.
using PassList = std::vector<PassChoice>;

// What a compiled step may assume about variables that it captures, or reaches through pointers.
enum class Captures : uint8_t {
  // Calls 2, 4, 8, ... trace the function again. A step that captures anything, and modules with members that no guard
  // sees, also run in eager mode and compiled from the same state, on calls 1, 2, 4, 8, ... A difference is an error.
  Checked,
  // The step reads nothing that can change, besides its arguments and values behind live(). It is not checked.
  None,
};

// How ranks make sure that they recompile together.
enum class Agree : uint8_t {
  // A cache hit does not communicate. If some ranks recompile and others do not, all throw at their next collective. If
  // a
  // rank cannot compile, all that communicate with it throw, or fall back to eager (fullgraph = false).
  OnError,
  // All ranks of the world exchange one number on every call. If one recompiles, all do; if one runs in eager mode, all
  // do.
  EveryCall,
};

// How a function is compiled. An option that is not given has the value of the innermost CompileScope, or else the
// default stated here.
struct CompileOptions {
  // Makes a step written for one rank data parallel over a mesh. Only for steps. Default: off.
  std::optional<DataParallel> parallel_mode = {};
  // Passes to run. Default: fold_views, common_subexpressions, fold_casts, dead_code, hoist_communication,
  // fuse_ddp_with_concat_op, schedule_comm_wait, fuse_bias, cublas_epilogues, cuda_kernels.
  std::optional<PassList> passes = {};
  // Generate C++ kernels that fuse pointwise ops. Default: true. Without a C++ compiler: one warning, no fusion.
  std::optional<bool> codegen = {};
  // What cannot be compiled is an error. false: it falls back to eager, with one warning. Default: true.
  std::optional<bool> fullgraph = {};
  // "tessera" compiles; "eager" calls the function unchanged. Default: "tessera".
  std::optional<std::string> backend = {};
  // Verify the program after every pass. Slow; for debugging passes. Default: false.
  std::optional<bool> verified = {};
  // How many programs are cached per compiled function, for calls with different shapes or modes. Default: 8.
  std::optional<size_t> cache_size = {};
  // Run the passes that move communication (hoist_communication, schedule_comm_wait, ...). Default: true.
  std::optional<bool> reorder = {};
  // A pass of `passes` that matches nothing is an error. false: one warning per compiled function. Default: false.
  std::optional<bool> strict_passes = {};
  // Runs programs instead of the built-in replay: called once per program, returns a function from input tensors to
  // output tensors. Default: replay.
  std::optional<compiler::MakeRunner> run_with = {};
  // Receives every compiled program with its stages, pass by pass. Default: if the environment variable
  // TESSERA_TRACE_DIR is set, HTML pages in that folder; otherwise none.
  std::optional<compiler::TraceSink> trace = {};
  // Check each of the first n calls: trace the function again, run it in eager mode and compiled from the same state,
  // and compare. A difference is an error that names the first op, or tensor. Host code with effects (counters,
  // logging) runs in these traces and runs too. Default: 0.
  std::optional<int64_t> check = {};
  // How often a function may be recompiled before it is an error. Default: 64.
  std::optional<size_t> recompile_limit = {};
  // See Captures. Default: Captures::Checked.
  std::optional<Captures> captures = {};
  // See Agree. Default: Agree::OnError.
  std::optional<Agree> agree = {};
  // See Numerics. An open NumericsScope takes precedence. Fast needs codegen. Default: TESSERA_NUMERICS, or else
  // Numerics::Fast.
  std::optional<Numerics> numerics = {};
  // For compile(module): the backward is two programs, one for the gradients of the arguments and one for those of the
  // parameters, and a backward that needs only one kind runs only that. A pipeline schedule runs them at different
  // times (I and W). Default: false.
  std::optional<bool> split_backward = {};
  // For compile(step): a file that CompiledStep::save() has written. A call like the saved one runs the program of the
  // file: without tracing, and without a compiler. Other calls are compiled as usual, with a warning; an error with
  // recompile_limit = 0. compile() throws UsageError if the file is damaged, from another user, or made for another
  // version, processor or other options. Default: none.
  std::optional<std::string> load = {};
};

// While it is alive, `options` are the defaults of compile() and compile_backward() on this thread.
//
//   const CompileScope scope({.codegen = false});
class CompileScope {
 public:
  // Scopes nest: options that are not given keep the value of the outer scope.
  explicit CompileScope(CompileOptions options);
  // Restores the defaults of the outer scope.
  ~CompileScope();
  CompileScope(const CompileScope&) = delete;

 private:
  CompileOptions before_;
};

}  // namespace tessera
