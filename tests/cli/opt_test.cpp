#include "tessera/cli/opt.h"

#include "tessera/base/detail/child_process.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <sstream>

namespace tessera::cli {
namespace {

constexpr const char* kProgram = R"(input %0: f32[2, 3] argument "0"
%1: f32[3, 2]{1, 3} in %0 = aten.t(%0)
%2: f32[2, 3] in %0 = aten.t(%1)
%3: f32[2, 3] = aten.relu(%2)
return %3
)";

std::string opt(const OptRequest& request, const std::string& text, std::string* report_text = nullptr) {
  std::ostringstream out, report;
  run_opt(request, text, out, report);
  if (report_text) *report_text = report.str();
  return out.str();
}

TEST(Opt, PassesRunInOrderAndReport) {
  std::string report;
  EXPECT_EQ(opt({{"fold_views", "dead_code", "common_subexpressions"}, true}, kProgram, &report),
            R"(input %0: f32[2, 3] argument "0"
%1: f32[2, 3] = aten.relu(%0)
return %1
)");
  EXPECT_CONTAINS(report, "fold_views");
  EXPECT_CONTAINS(report, "matched once");
  EXPECT_CONTAINS(report, "matched nothing");
  EXPECT_CONTAINS(report, " ms");
  EXPECT_LT(report.find("fold_views"), report.find("dead_code"));
  EXPECT_EQ(opt({}, kProgram), kProgram);
  EXPECT_EQ(opt({{"dead_code"}}, opt({{"fold_views"}}, kProgram)), opt({{"fold_views", "dead_code"}}, kProgram));
}

TEST(Opt, BadInputIsAUsageError) {
  EXPECT_ERROR(UsageError, opt({{"fold_vews"}}, kProgram), "fold_vews", "fold_views", "dead_code");
  EXPECT_ERROR(UsageError, opt({}, "input %0: f32[2] argument \"0\"\n%1: f32[2] = aten.rellu(%0)\n"), "line 2",
               "aten.rellu");
  EXPECT_ERROR(UsageError, opt({}, "input %0: f31[2] argument \"0\"\n"), "line 1", "f31");
  EXPECT_ERROR(UsageError, opt({}, "return %4\n"), "line 1", "%4");
  // It parses, but the verifier rejects it.
  EXPECT_ERROR(UsageError, opt({}, R"(group @dp [0, 1]
input %0: f32[2] argument "0"
%1: f32[2] = tessera.all_reduce(%0, "sum", @dp)
%2: f32[2] = aten.neg(%1)
return %2
)"),
               "invalid program", "aten.neg(%1)");
}

// Runs the program as a child process. Each start loads LibTorch.
ChildResult run(std::vector<std::string> arguments, ChildErrors errors = ChildErrors::InOutput) {
  arguments.insert(arguments.begin(), {TESSERA_PROGRAM, "opt"});
  return run_child(arguments, errors);
}

TEST(Opt, ExitCodesAndOutput) {
  const auto file = ::testing::TempDir() + "opt_test.ir";
  std::ofstream(file) << kProgram;
  const auto good = run({"--pass=fold_views", "--pass=dead_code", file}, ChildErrors::Dropped);
  EXPECT_EQ(good.exit_code, 0);
  EXPECT_EQ(good.out, "input %0: f32[2, 3] argument \"0\"\n%1: f32[2, 3] = aten.relu(%0)\nreturn %1\n");
  const auto unknown = run({"--pass=fold_vews", file});
  EXPECT_EQ(unknown.exit_code, 2);
  EXPECT_CONTAINS(unknown.out, "fold_vews");
  EXPECT_EQ(std::count(unknown.out.begin(), unknown.out.end(), '\n'), 1) << unknown.out;
  std::remove(file.c_str());
  const auto missing = run({file});
  EXPECT_EQ(missing.exit_code, 2);
  EXPECT_CONTAINS(missing.out, "cannot read");
}

TEST(Opt, ListsThePasses) {
  std::ostringstream out;
  list_passes(out);
  EXPECT_CONTAINS(out.str(), "fuse_ddp_with_concat_op");
}

}  // namespace
}  // namespace tessera::cli
