// A browser shows the page of `tessera trace` from a single file.
#include "tessera/base/detail/child_process.h"
#include "tessera/testing/detail/file_check.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

std::string find_browser() {
  for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
    if (run_child({name, "--version"}, ChildErrors::Dropped).exit_code == 0) return name;
  return "";
}

TEST(Trace, ABrowserShowsThePage) {
  const auto browser = find_browser();
  if (browser.empty()) GTEST_SKIP() << "chromium is not installed; run tools/bootstrap browser";
  std::string pattern = ::testing::TempDir() + "browserXXXXXX";
  const fs::path folder = mkdtemp(pattern.data());
  const auto file = folder / "page.html";
  const auto made = run_child({TESSERA_PROGRAM, "trace", "--parallel", "ddp", "-o", file.string()});
  ASSERT_EQ(made.exit_code, 0) << made.out;
  const auto shown =
      run_child({browser, "--headless", "--no-sandbox", "--disable-gpu",
                 "--user-data-dir=" + (folder / "profile").string(), "--dump-dom", "file://" + file.string()},
                ChildErrors::Dropped);
  ASSERT_EQ(shown.exit_code, 0) << shown.out;
  FileCheck()
      .check("<table id=\"passes\">")
      .check("fold_views")
      .check("schedule_comm_wait")
      .check("<svg id=\"curve\"")
      .check("class=\"own\" d=\"M0 220H0V")
      .check("id=\"cursor\" d=\"M")  // the script ran and marks the peak memory
      .check("<p id=\"here\">line ")
      .check("bytes in use. ")
      .check("<table id=\"collectives\">")
      .check("<del data-n=")
      .check("<ins data-n=")
      .run(shown.out);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace tessera::testing
