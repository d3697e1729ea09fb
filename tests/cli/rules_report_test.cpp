#include "tessera/cli/rules_report.h"

#include "tessera/base/detail/json.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <torch/headeronly/version.h>
#include <algorithm>
#include <sstream>

namespace tessera::cli {
namespace {

// Every overload for which PyTorch's DTensor has a strategy runs on DTensors here.
TEST(RulesReport, EveryOverloadOfTheListHasAStrategy) {
  const auto ops = coverage_of_list(pytorch_ops());
  EXPECT_EQ(ops.size(), 1128u);
  int gathered = 0;
  for (const auto& op : ops) {
    EXPECT_NE(op.how, OpCoverage::How::None) << op.op;
    gathered += op.gathered;
    EXPECT_TRUE(!op.gathered || op.detail.find("no rule yet") == std::string::npos) << op.op << " has no reason";
  }
  EXPECT_LE(gathered, 40);
}

TEST(RulesReport, FormsOfOneOp) {
  EXPECT_EQ(coverage_of("aten::mm").detail, "matmul");
  EXPECT_EQ(coverage_of("aten::mm.out").detail, "aten::mm");
  EXPECT_EQ(coverage_of("aten::nonzero").how, OpCoverage::How::Gathered);
  EXPECT_TRUE(coverage_of("aten::histc.out").gathered);
  EXPECT_EQ(coverage_of("aten::einsum").how, OpCoverage::How::Composite);
  EXPECT_EQ(coverage_of("aten::equal").how, OpCoverage::How::Kernel);
  EXPECT_EQ(coverage_of("aten::resize_").detail, "view");
  EXPECT_EQ(coverage_of("aten::set_").how, OpCoverage::How::None);
  EXPECT_EQ(coverage_of("aten::no_such_op").how, OpCoverage::How::Absent);
}

std::string printed(const std::function<void(std::ostream&)>& print) {
  std::ostringstream out;
  print(out);
  return out.str();
}

// The page of the docs is what the program prints: tessera rules coverage --markdown > docs/ops.md
TEST(RulesReport, DocsPageIsCurrent) {
  if (TORCH_VERSION_MINOR != 13) GTEST_SKIP() << "LibTorch " TORCH_VERSION "; the page has the ops of 2.13";
  const auto page = read_text_file(TESSERA_PARITY_SCRIPTS "/../../docs/ops.md", "the page of all ops");
  EXPECT_EQ(page, printed([](auto& out) { print_coverage_markdown(coverage_of_list(pytorch_ops()), out); }));
}

TEST(RulesReport, ShowPrintsTheStrategiesOfACall) {
  const auto text = printed([](auto& out) { show_op("aten::mm", {"8x10", "10x4"}, false, out); });
  EXPECT_CONTAINS(text, "rule: matmul");
  EXPECT_CONTAINS(text, "  S(1), S(0) -> P(sum)\n");
  const auto json = Json::parse(printed([](auto& out) { show_op("aten::mm", {"8x10", "10x4"}, true, out); }), "show");
  EXPECT_EQ(json.at("strategies").items().size(), 6u);
  EXPECT_CONTAINS(printed([](auto& out) {
                    show_op("aten::sum.dim_IntList", {"5x3", "dim=[1]"}, false, out);
                  }),
                  "S(0) -> S(0)");
}

TEST(RulesReport, VerifyTestsACall) {
  EXPECT_TRUE(verify_op("aten::add.Tensor", {}, false, std::cout));
  const auto text = printed([](auto& out) { EXPECT_TRUE(verify_op("aten::mm", {"5x3", "3x4"}, false, out)); });
  EXPECT_CONTAINS(text, "1 calls, 4 strategies");
}

TEST(RulesReport, ExplainPrintsTheDecision) {
  const auto text = printed([](auto& out) { explain_op("aten::mm", {"64x10:S(0)", "10x4:S(0)"}, "tp=4", false, out); });
  EXPECT_CONTAINS(text, "axis tp, 4 ranks");
  const auto json = printed([](auto& out) { explain_op("aten::mm", {"64x10:S(0)", "10x4:S(0)"}, "tp=4", true, out); });
  EXPECT_EQ(Json::parse(json, "explain").at("explanation").text(), text);
  EXPECT_CONTAINS(text, "all_gather");
}

TEST(RulesReport, WrongCallsSayWhatIsMissing) {
  std::ostringstream out;
  EXPECT_CONTAINS(testing::error_message<UsageError>([&] { show_op("aten::no_such_op", {}, false, out); }),
                  "no_such_op");
  EXPECT_CONTAINS(testing::error_message<UsageError>([&] { show_op("aten::mm", {"8x10"}, false, out); }), "mat2");
  EXPECT_CONTAINS(testing::error_message<UsageError>([&] { show_op("aten::mm", {"8xq", "3x4"}, false, out); }), "8xq");
}

}  // namespace
}  // namespace tessera::cli
