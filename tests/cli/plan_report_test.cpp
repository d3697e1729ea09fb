#include "tessera/cli/plan_report.h"

#include "tessera/base/error.h"
#include "tessera/tensor_parallel/detail/plan_text.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <sstream>

namespace tessera::cli {
namespace {

const PlanReportRow& row_of(const PlanReport& report, const std::string& module) {
  for (const auto& row : report.rows)
    if (row.module == module) return row;
  throw std::runtime_error("no row " + module);
}

TEST(PlanReport, ReportsTheModelsPlan) {
  const auto report = make_plan_report({.model = "gpt-tiny", .ranks = 2, .batch = 2, .sequence = 8});
  EXPECT_EQ(row_of(report, "h.*.attn.c_proj").forward.collectives, "all_reduce");
  EXPECT_EQ(row_of(report, "h.*.attn.c_proj").backward.count, 0);
  EXPECT_EQ(row_of(report, "h.*.attn.c_attn").forward.count, 0);
  EXPECT_EQ(row_of(report, "h.*.attn.c_attn").backward.collectives, "all_reduce");
  EXPECT_EQ(row_of(report, "h.*.attn.c_attn").count, report.layers);
  // 16 tokens x features x 4 bytes
  EXPECT_EQ(row_of(report, "h.*.attn.c_proj").forward.bytes,
            16 * row_of(report, "h.*.attn.c_proj").work.parameters[0].sizes[0] * 4);
  EXPECT_EQ(report.other_forward.count, 0);
  EXPECT_LT(report.local_parameters, report.parameters);
  std::ostringstream text;
  text << report;
  EXPECT_CONTAINS(text.str(), "h.*.mlp.c_fc");
  EXPECT_CONTAINS(text.str(), "colwise(sections=3)");
}

TEST(PlanReport, SequenceParallelismUsesReduceScatterAndAllGather) {
  const auto report = make_plan_report(
      {.model = "llama-tiny", .ranks = 2, .options = {.sequence_parallel = true}, .batch = 2, .sequence = 8});
  EXPECT_EQ(row_of(report, "layers.*.attention").forward.collectives, "all_gather_into_tensor");
  EXPECT_EQ(row_of(report, "layers.*.attention").backward.collectives, "reduce_scatter_tensor");
  EXPECT_EQ(row_of(report, "layers.*.attention.wo").forward.collectives, "reduce_scatter_tensor");
}

TEST(PlanReport, BadPlansAreUsageErrors) {
  EXPECT_ERROR(UsageError, make_plan_report({.model = "gpt-tinny"}), "gpt-tinny", "gpt-tiny");
  EXPECT_ERROR(UsageError, make_plan_report({.model = "gpt-tiny", .plan = parse_plan("h.*.atn = colwise")}), "h.*.atn");
  EXPECT_ERROR(UsageError, make_plan_report({.model = "gpt-tiny", .ranks = 3}), "heads", "ranks");
  make_plan_report({.model = "gpt-tiny", .ranks = 1, .sequence = 4});  // the fake world was destroyed
}

}  // namespace
}  // namespace tessera::cli
