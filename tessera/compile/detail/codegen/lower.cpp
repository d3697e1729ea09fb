#include "tessera/compile/detail/codegen/lower.h"

#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/codegen/system_compiler.h"
#include "tessera/tracing/detail/invariant_scope.h"

namespace tessera::compiler {
namespace {

// A scope of Numerics::Invariant takes precedence.
bool is_fast(const Settings& settings) { return settings.numerics == Numerics::Fast && !invariant_scope_is_open(); }

std::vector<PassReport> generate_kernels(Program& program, const Settings& settings) {
  if (!codegen::compiler_available()) {
    warn_once("codegen/no compiler",
              "codegen: found no C++ compiler (CXX, or c++, g++, clang++ in PATH); programs are replayed op by op");
    return {};
  }
  auto fused = program;
  std::vector<Pass> passes;
  if (is_fast(settings)) passes.push_back(find_pass("fuse_small_ops"));
  passes.push_back(find_pass("fuse_pointwise"));
  auto report = run_passes(fused, passes, settings.verified);
  if (fused.kernels.empty()) return report;
  try {
    codegen::KernelLibrary::load(fused.kernels);  // into the disk cache, where the executable finds it
  } catch (const UsageError& error) {
    warn_once("codegen/failed", c10::str(error.what_without_backtrace(), "\nprograms are replayed op by op"));
    return {};
  }
  program = std::move(fused);
  return report;
}

}  // namespace

std::vector<PassReport> lower(Program& program, const Settings& settings) {
  if (settings.run_with) return {};  // custom runners see the original ops
  auto report = run_passes(program, {find_pass("in_place_collectives")}, settings.verified);
  const auto append = [&](std::vector<PassReport> more) {
    for (auto& each : more) report.push_back(std::move(each));
  };
  const bool fast = settings.codegen && is_fast(settings);
  // A value is recomputed before kernels are generated, so that they can contain it. When ops are in-place, the peak is
  // elsewhere.
  if (fast) {
    constexpr const char* kFastPasses[] = {"fuse_cpu_bias", "recompute",          "in_place_ops(bytes=65536)",
                                           "recompute",     "recompute_products", "fast_products",
                                           "cpu_kernels"};
    std::vector<Pass> passes;
    if (settings.widens_bfloat16) passes.push_back(find_pass("widen_bfloat16"));
    for (const auto* name : kFastPasses) passes.push_back(find_pass(name));
    append(run_passes(program, passes, settings.verified));
  }
  if (settings.codegen) append(generate_kernels(program, settings));
  return report;
}

}  // namespace tessera::compiler
