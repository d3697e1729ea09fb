// Peer scripts are Python. Here sh runs them, so that the test needs no Python.
#include "benchmarks/harness/peer.h"

#include "tessera/base/detail/child_process.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

namespace tessera::bench {
namespace {

class Peer : public ::testing::Test {
 protected:
  Peer() {
    std::string pattern = ::testing::TempDir() + "peersXXXXXX";
    folder_ = mkdtemp(pattern.data());
    setenv("TESSERA_PEERS", folder_.c_str(), 1);
    setenv("TESSERA_PYTHON", "sh", 1);
  }
  ~Peer() override { std::filesystem::remove_all(folder_); }
  PeerFigures run(const std::string& script) {
    std::ofstream(folder_ / "x.py") << script;
    return run_peer("x", log_);
  }
  std::filesystem::path folder_;
  std::ostringstream log_;
};

TEST_F(Peer, FiguresAreReadByCase) {
  auto figures = run(R"(echo '{"case":"add/1/-/hit","value":7.5,"plain":0.5}'; echo '{"case":"t/1/-/hit","value":3}')");
  ASSERT_EQ(figures.size(), 2u);
  EXPECT_EQ(figures["add/1/-/hit"].value, 7.5);
  EXPECT_EQ(figures["add/1/-/hit"].plain, 0.5);
  EXPECT_EQ(figures["t/1/-/hit"].value, 3);
  EXPECT_FALSE(figures["t/1/-/hit"].plain);
  EXPECT_EQ(log_.str(), "");
}

TEST_F(Peer, AMissingScriptIsOneLine) {
  EXPECT_TRUE(run_peer("absent", log_).empty());
  EXPECT_EQ(log_.str(), "no peer figures: cannot find benchmarks/peers/absent.py\n");
}

TEST_F(Peer, AFailingScriptIsAnError) {
  EXPECT_ERROR(UsageError, run(R"(echo '{"case":"half/1/-/hit","value":1}'; exit 3)"), "exit code 3");
}

TEST_F(Peer, AMissingPythonIsAnError) {
  setenv("TESSERA_PYTHON", "no-such-program-at-all", 1);
  EXPECT_ERROR(UsageError, run(""), "exit code 127");
}

TEST_F(Peer, OtherTextIsAUsageError) {
  for (auto line : {"hello", "[1]", R"({"case":"a/1/-/b"})", R"({"case":1,"value":1})", R"({"case":"a","value":"1"})"})
    EXPECT_THROW(parse_peer_lines(line), UsageError) << line;
}

TEST(ChildProcess, ReturnsOutputAndExitCode) {
  auto result = run_child({"sh", "-c", "printf 'two\nlines'; exit 7"});
  EXPECT_EQ(result.out, "two\nlines");
  EXPECT_EQ(result.exit_code, 7);
  EXPECT_EQ(run_child({"sh", "-c", "kill -9 $$"}).exit_code, 128 + 9);
}

}  // namespace
}  // namespace tessera::bench
