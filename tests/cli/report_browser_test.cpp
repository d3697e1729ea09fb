// `tessera train` writes a page that a browser shows without network and without errors; `tessera report` compares runs
// and serves them.
#include "tessera/cli/report.h"

#include "tessera/base/detail/child_process.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/base/error.h"
#include "tessera/cli/loopback_server.h"
#include "tessera/testing/detail/file_check.h"
#include "tessera/testing/expect_error.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <thread>

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using tessera::testing::FileCheck;

std::string report_browser() {
  for (const char* name : {"chromium", "chromium-browser", "google-chrome"})
    if (run_child({name, "--version"}, ChildErrors::Dropped).exit_code == 0) return name;
  return "";
}

// A run of two ranks, made once.
const std::string& trained_run() {
  static const std::string folder = [] {
    std::string pattern = ::testing::TempDir() + "reportXXXXXX";
    const std::string made = mkdtemp(pattern.data());
    const auto trained =
        run_child({TESSERA_PROGRAM,  "train", "--mesh",   "dp=2",       "--layers", "1", "--dim",        "32",
                   "--heads",        "2",     "--batch",  "8",          "--steps",  "4", "--eval-every", "2",
                   "--eval.samples", "8",     "--output", made + "/a<b"},
                  ChildErrors::InOutput);
    EXPECT_EQ(trained.exit_code, 0) << trained.out;
    return made + "/a<b";
  }();
  return folder;
}

// The page after its scripts have run, then the messages of the console.
std::string shown_by_browser(const std::string& browser, const std::string& address) {
  std::string pattern = ::testing::TempDir() + "profileXXXXXX";
  const std::string profile = mkdtemp(pattern.data());
  const auto shown =
      run_child({browser, "--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir=" + profile,
                 "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--dump-dom", address},
                ChildErrors::InOutput);
  fs::remove_all(profile);
  EXPECT_EQ(shown.exit_code, 0) << shown.out;
  EXPECT_EQ(shown.out.find("CONSOLE"), std::string::npos) << shown.out;
  return shown.out;
}

void expect_report_of_run(const std::string& page) {
  FileCheck()
      .check("id=\"state\">completed")
      .check("id=\"tiles\"")
      .check("4 / 4")
      .check("id=\"curves\"")
      .check("aria-label=\"Loss\"")
      .check("id=\"timeline\"")
      .check("id=\"byop\"")
      .check("aten::")
      .check("id=\"bycollective\"")
      .check("all_reduce")
      .check("id=\"byrank\"")
      .check("aria-label=\"memory over the step\"")
      .check("id=\"mesh\"")
      .check("rank 1")
      .check("id=\"parameters\"")
      .check("wte.weight")
      .check("id=\"traffic\"")
      .check("id=\"notes\"")
      .check("id=\"config\"")
      .check("parallel.mesh")
      .check("id=\"versiontable\"")
      .check("LibTorch")
      .run(page);
}

TEST(Report, ABrowserShowsTheReportOfARun) {
  const auto browser = report_browser();
  if (browser.empty()) GTEST_SKIP() << "chromium is not installed; run tools/bootstrap browser";
  const auto page = trained_run() + "/report.html";
  ASSERT_TRUE(fs::exists(page));
  EXPECT_EQ(read_text_file(page, "the page").find("http://"),
            read_text_file(page, "the page").find("http://www.w3.org"));
  expect_report_of_run(shown_by_browser(browser, "file://" + page));
  const auto trace = Json::parse(read_text_file(trained_run() + "/trace.json", "the trace"), "the trace");
  std::set<int64_t> ranks;
  for (const auto& event : trace.at("traceEvents").items()) ranks.insert(event.at("pid").number());
  EXPECT_EQ(ranks, (std::set<int64_t>{0, 1}));
}

TEST(Report, ABrowserComparesRuns) {
  const auto browser = report_browser();
  if (browser.empty()) GTEST_SKIP() << "chromium is not installed; run tools/bootstrap browser";
  const auto other = fs::path(trained_run()).parent_path() / "other";
  fs::copy(trained_run(), other, fs::copy_options::recursive);
  fs::remove_all(other / "profile");
  const auto file = (other / "both.html").string();
  write_text_file(file, report_page(report_data(open_runs({trained_run(), other.string()}))));
  FileCheck()
      .check("2 runs")
      .check("id=\"runtable\"")
      .check("a&lt;b")
      .check("other")
      .check("aria-label=\"Loss\"")
      .check("Options that differ")
      .run(shown_by_browser(browser, "file://" + file));
}

std::string http(int64_t port, const std::string& request) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  to.sin_port = htons(static_cast<uint16_t>(port));
  EXPECT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to), 0);
  EXPECT_EQ(::send(fd, request.data(), request.size(), 0), static_cast<ssize_t>(request.size()));
  std::string answer;
  char buffer[4096];
  for (ssize_t got = 0; (got = ::recv(fd, buffer, sizeof buffer, 0)) > 0;)
    answer.append(buffer, static_cast<size_t>(got));
  close(fd);
  return answer;
}

TEST(Report, TheServerAnswersThisMachineOnly) {
  LoopbackServer server(0);
  std::jthread serving([&] {
    server.run([](std::string_view path) {
      return path == "/data.json" ? HttpAnswer{200, "application/json", "{}"} : HttpAnswer();
    });
  });
  const auto host = c10::str("\r\nHost: 127.0.0.1:", server.port(), "\r\n\r\n");
  EXPECT_NE(http(server.port(), "GET /data.json?x=1 HTTP/1.1" + host).find("\r\n\r\n{}"), std::string::npos);
  EXPECT_TRUE(http(server.port(), "GET /etc/passwd HTTP/1.1" + host).starts_with("HTTP/1.1 404"));
  EXPECT_TRUE(http(server.port(), "POST / HTTP/1.1" + host).starts_with("HTTP/1.1 405"));
  EXPECT_TRUE(http(server.port(), "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n").starts_with("HTTP/1.1 403"));
  EXPECT_TRUE(http(server.port(), "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 403"));
  EXPECT_ERROR(UsageError, LoopbackServer(server.port()), "is in use", "--port");
  server.stop();
}

TEST(Report, TheServedPageFollowsTheRun) {
  const auto browser = report_browser();
  if (browser.empty()) GTEST_SKIP() << "chromium is not installed; run tools/bootstrap browser";
  const auto live = fs::path(trained_run()).parent_path() / "live";
  fs::create_directories(live);
  fs::copy(fs::path(trained_run()) / "config.toml", live / "config.toml");
  write_run_file(live.string(), 2, RunState::Running);
  const auto all = read_text_file(trained_run() + "/metrics.jsonl", "the metrics");
  write_text_file((live / "metrics.jsonl").string(),
                  all.substr(0, all.find('\n') + 20));  // the second line is not complete
  const auto runs = open_runs({live.string()});
  LoopbackServer server(0);
  int64_t polls = 0;
  std::jthread serving([&] {
    server.run([&](std::string_view path) {
      if (path == "/") return HttpAnswer{200, "text/html", report_page(report_data(runs, true))};
      if (path != "/data.json") return HttpAnswer();
      if (polls++ == 0) write_text_file((live / "metrics.jsonl").string(), all);  // the run goes on
      return HttpAnswer{200, "application/json", report_data(runs, true).dump()};
    });
  });
  // The browser's time runs ahead until the page has asked three times.
  std::string pattern = ::testing::TempDir() + "profileXXXXXX";
  const std::string profile = mkdtemp(pattern.data());
  const auto shown =
      run_child({browser, "--headless", "--no-sandbox", "--disable-gpu", "--user-data-dir=" + profile,
                 "--enable-logging=stderr", "--virtual-time-budget=7000", "--dump-dom", server.address()},
                ChildErrors::InOutput);
  server.stop();
  fs::remove_all(profile);
  EXPECT_EQ(shown.out.find("CONSOLE"), std::string::npos) << shown.out;
  EXPECT_GE(polls, 1);
  FileCheck().check("id=\"state\">running").check("4 / 4").check(", live.").run(shown.out);
}

TEST(Report, NamesAFolderThatIsNoRun) {
  EXPECT_ERROR(UsageError, open_runs({"/tmp"}), "'/tmp' is not an output folder of tessera train", "config.toml");
}

}  // namespace
}  // namespace tessera::cli
