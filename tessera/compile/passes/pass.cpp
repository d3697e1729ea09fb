#include "tessera/compile/passes/pass.h"

#include "tessera/base/error.h"
#include "tessera/compile/passes/passes.h"

#include <chrono>

namespace tessera::compiler {

const std::vector<PassRow>& known_passes() {
  static const std::vector<PassRow> rows = {
      {"fold_views", "a view that shows what another value shows already is that value", fold_views},
      {"common_subexpressions", "what is computed twice is computed once", common_subexpressions},
      {"dead_code", "what nobody reads is not computed", dead_code},
      {"hoist_communication", "collectives are posted as soon as what they send is there", hoist_communication},
      {"fuse_ddp_with_concat_op", "gradients are reduced in buckets, each concatenated", fuse_ddp_with_concat_op},
      {"fuse_ddp_with_coalesced_op", "gradients are reduced in buckets, each one coalesced collective",
       fuse_ddp_with_coalesced_op},
      {"bucket_all_gathers", "all-gathers that follow one another are one collective with several parts",
       bucket_all_gathers},
      {"prefetch_all_gathers", "an all-gather is posted before what the one before it gave is computed with",
       prefetch_all_gathers},
      {"bucket_reduce_scatters", "reduce-scatters that follow one another are one collective with several parts",
       bucket_reduce_scatters},
      {"schedule_comm_wait", "collectives are waited for where their results are first read", schedule_comm_wait},
      {"in_place_collectives", "what is reduced and not read again is reduced where it lies", in_place_collectives},
      {"fuse_pointwise", "pointwise ops that follow one another are one generated function", fuse_pointwise},
  };
  return rows;
}

Pass find_pass(const std::string& name) {
  std::vector<std::string> names;
  for (const auto& row : known_passes()) {
    if (name == row.name) return {row.name, row.run};
    names.emplace_back(row.name);
  }
  TESSERA_FAIL(UsageError, "no pass is called ", name, "; there are ", c10::Join(", ", names));
}

std::vector<PassReport> run_passes(Program& program, const std::vector<Pass>& passes, bool verified) {
  std::vector<PassReport> report;
  if (verified) verify(program);
  for (const auto& pass : passes) {
    const auto begin = std::chrono::steady_clock::now();
    auto matched = pass.run(program);
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    report.push_back({pass.name, std::move(matched), took.count()});
    if (!verified) continue;
    try {
      verify(program);
    } catch (const InternalError& error) {
      TESSERA_FAIL(InternalError, "after pass ", pass.name, ": ", error.what_without_backtrace());
    }
  }
  return report;
}

}  // namespace tessera::compiler
