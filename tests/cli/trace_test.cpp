// The HTML page of `tessera trace`. trace_browser_test.cpp opens it in a browser.
#include "tessera/cli/trace.h"

#include "tessera/base/error.h"
#include "tessera/compile/api/compile.h"
#include "tessera/compile/detail/report/diff.h"
#include "tessera/compile/detail/report/memory_curve.h"
#include "tessera/compile/detail/report/trace_page.h"
#include "tessera/nn/modules.h"
#include "tessera/testing/detail/file_check.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using compiler::diff_lines;
using compiler::DiffLine;
using tessera::testing::FileCheck;

std::string diff_text(const std::vector<std::string>& before, const std::vector<std::string>& after) {
  std::string text;
  for (const auto& line : diff_lines(before, after)) {
    text += line.kind == DiffLine::Kind::Same ? ' ' : line.kind == DiffLine::Kind::Added ? '+' : '-';
    text += (line.kind == DiffLine::Kind::Removed ? before : after)[line.line];
  }
  return text;
}

TEST(Diff, MarksChangedLines) {
  EXPECT_EQ(diff_text({"a", "b", "c", "d"}, {"b", "x", "c", "d"}), "-a b+x c d");
  EXPECT_EQ(diff_text({"a", "b", "c"}, {"c", "a", "b"}), "+c a b-c");  // a moved line is removed and added
  EXPECT_EQ(diff_text({"r", "r", "a", "r"}, {"r", "a", "r", "r"}), " r-r a r+r");
  EXPECT_EQ(diff_text({}, {"a"}), "+a");
  EXPECT_EQ(diff_text({"a", "a"}, {"a"}), " a-a");
  EXPECT_EQ(diff_text({}, {}), "");
}

TEST(MemoryCurve, CountsBytesInUseAtEachNode) {
  const auto program = compiler::parse(R"(input %0: f32[8] argument "0"
%1: f32[8] = aten.relu(%0)
%2: f32[8] = aten.neg(%1)
%3: f32[16] = aten.cat([%2, %2], 0)
%4: f32[8] = aten.neg(%0)
return %3
)");
  EXPECT_EQ(compiler::memory_curve(program).own,
            (std::vector<int64_t>{32, 64, 96, 96}));  // %3 is an output, so it stays alive
}

class Folder {
 public:
  Folder() {
    std::string pattern = ::testing::TempDir() + "traceXXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~Folder() { fs::remove_all(path_); }
  const fs::path& path() const { return path_; }

 private:
  fs::path path_;
};

std::string read(const fs::path& path) {
  std::ifstream in(path);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

TEST(Trace, ThePageHasPassesCollectivesAndKernels) {
  const auto page = make_trace_page({.model = "mlp", .parallel = "ddp"});
  FileCheck()
      .check("id=passes")
      .check("fuse_ddp_with_concat_op</a></td><td>1</td>")
      .check("Times of the first run")
      .check(" GB/s (a copy)")
      .check("of the roof</th>")
      .check("<td><a href=\"#kernel-cpp_small_")
      .check("id=slowest")
      .check("id=collectives")
      .check("<td>all_reduce</td><td>1384</td>")  // all 346 parameters in one all-reduce
      .check("<td>0, 1</td>")
      .check("id=buffers")
      .check("traced</h3>")
      .check("aten.cat(")
      .check("id=\"kernel-cpp_fused_")
      .check("id=\"kernel-cpp_small_")
      .run(page);
  EXPECT_EQ(page.find("http"), std::string::npos);  // the page loads nothing
  const auto sharded =
      make_trace_page({.model = "mlp", .parallel = "fully_shard", .ranks = 3, .passes = {{"dead_code"}}});
  EXPECT_CONTAINS(sharded, "<td>reduce_scatter_tensor</td>");
  EXPECT_CONTAINS(sharded, "dead_code</a>");
  EXPECT_EQ(sharded.find("fold_views"), std::string::npos);
}

TEST(Trace, BadRequestsAreUsageErrors) {
  EXPECT_ERROR(UsageError, make_trace_page({.model = "gpt-tinny"}), "gpt-tinny", "gpt-tiny");
  EXPECT_ERROR(UsageError, make_trace_page({.parallel = "zero3"}), "zero3", "fully_shard");
  EXPECT_ERROR(UsageError, make_trace_page({.passes = {{"no_such"}}}), "no_such", "dead_code");
  EXPECT_ERROR(UsageError, make_trace_page({.ranks = 0}), "at least 1");
}

struct Warnings : c10::WarningHandler {
  void process(const c10::Warning& warning) override { messages.push_back(warning.msg()); }
  std::vector<std::string> messages;
};

TEST(Trace, AnUnwritablePageIsOnlyAWarning) {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  auto step =
      compile([](const at::Tensor& x) { return x * 2; }, {.trace = compiler::trace_into("/dev/null/no_such_folder")});
  EXPECT_TRUE(at::equal(step(torch::ones({3})), torch::full({3}, 2.0)));
  ASSERT_EQ(warnings.messages.size(), 1u);
  EXPECT_CONTAINS(warnings.messages[0], "cannot write '/dev/null/no_such_folder/step-0.rank0.html'");
}

TEST(Trace, APageSaysWhyItsProgramWasRecompiled) {
  std::vector<compiler::CompileTrace> traces;
  auto step = compile([](const at::Tensor& x) { return x * 2; },
                      {.trace = [&](const compiler::CompileTrace& trace) { traces.push_back(trace); }});
  step(torch::ones({3}));
  step(torch::ones({4}));
  ASSERT_EQ(traces.size(), 2u);
  EXPECT_EQ(traces[0].recompiled_because, "");
  EXPECT_CONTAINS(traces[1].recompiled_because, "f32[4]");
  for (const auto& trace : traces) {
    ASSERT_EQ(trace.milliseconds.size(), trace.stages.back().program.nodes.size());
    EXPECT_GT(trace.milliseconds.back(), 0);
  }
  std::ostringstream page;
  compiler::trace_page(page, traces[1], "step");
  EXPECT_CONTAINS(page.str(), "<p id=recompiled>Recompiled, because ");
}

// So a program copied from a page is valid input of `tessera opt`.
TEST(Trace, ProgramsParseAfterEveryPass) {
  size_t stages = 0;
  auto step = compile(
      [](const at::Tensor& x, const at::Tensor& w) {
        auto weight = w.detach().requires_grad_();
        (x.mm(weight).softmax(1).view({-1, 2}) * 0.5 + 1).pow(2).mean().backward();
        return std::vector<at::Tensor>{weight.grad(), x.sum(0)};
      },
      {.trace = [&](const compiler::CompileTrace& trace) {
        for (const auto& [pass, program] : trace.stages) {
          auto again = compiler::parse(compiler::text_of(program));
          verify(again);
          auto numbered = program;
          renumber(numbered);
          renumber(again);
          EXPECT_EQ(compiler::text_of(again), compiler::text_of(numbered)) << pass.name;
          stages++;
        }
      }});
  step(torch::ones({3, 5}), torch::ones({5, 4}));
  EXPECT_GT(stages, compiler::default_passes().size() + 2);  // plus tracing and lowering
}

// With TESSERA_TRACE_DIR every compilation writes a page, after the first run of the program. A compiled module has two
// programs.
TEST(Trace, TraceDirWritesAPagePerCompilation) {
  const Folder folder;
  setenv("TESSERA_TRACE_DIR", folder.path().c_str(), 1);
  auto step = compile([](const at::Tensor& x) { return (x * 2).relu() + 1; });
  step(torch::ones({3}));
  step(torch::ones({3}));
  step(torch::ones({4}));  // compiled again
  auto module = compile(tessera::nn::Linear(3, 2));
  module(torch::ones({5, 3})).sum().backward();
  unsetenv("TESSERA_TRACE_DIR");
  for (const char* name : {"step-0", "step-1", "forward-0", "backward-0"})
    EXPECT_CONTAINS(read(folder.path() / (std::string(name) + ".rank0.html")), "id=passes");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 4);
  auto quiet = compile([](const at::Tensor& x) { return x * 2; });
  quiet(torch::ones({3}));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), {}), 4);
}

}  // namespace
}  // namespace tessera::cli
