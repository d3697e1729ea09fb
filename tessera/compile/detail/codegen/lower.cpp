#include "tessera/compile/detail/codegen/lower.h"

#include "tessera/base/detail/warn_once.h"
#include "tessera/base/error.h"
#include "tessera/compile/detail/codegen/kernel_library.h"
#include "tessera/compile/detail/codegen/system_compiler.h"

namespace tessera::compiler {
namespace {

std::vector<PassReport> generate_kernels(Program& program, const Settings& settings) {
  if (!codegen::compiler_available()) {
    warn_once("codegen/no compiler",
              "codegen: found no C++ compiler (CXX, or c++, g++, clang++ in PATH); programs are replayed op by op");
    return {};
  }
  auto fused = program;
  std::vector<Pass> passes;
  if (settings.numerics == Numerics::Fast) passes.push_back(find_pass("fuse_small_ops"));
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
  const bool fast = settings.codegen && settings.numerics == Numerics::Fast;
  // A cheap value is recomputed before kernels are generated, so that they can contain it. After that, ops are in-place
  // where it is safe, and the peak is elsewhere.
  if (fast) append(run_passes(program, {find_pass("fast_products"), find_pass("recompute")}, settings.verified));
  if (settings.codegen) append(generate_kernels(program, settings));
  if (fast) append(run_passes(program, {find_pass("in_place_ops"), find_pass("recompute")}, settings.verified));
  return report;
}

}  // namespace tessera::compiler
