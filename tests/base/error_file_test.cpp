#include "tessera/base/error_file.h"

#include "tessera/base/error.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <sstream>

namespace tessera {
namespace {

class ErrorFile : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = ::testing::TempDir() + "errorsXXXXXX";
    folder_ = mkdtemp(pattern.data());
    file_ = folder_ + "/error.json";
    setenv("TORCHELASTIC_ERROR_FILE", file_.c_str(), 1);
  }
  void TearDown() override {
    unsetenv("TORCHELASTIC_ERROR_FILE");
    unlink(file_.c_str());
    EXPECT_EQ(rmdir(folder_.c_str()), 0);  // nothing else was left there
  }
  std::string text() const {
    std::ostringstream all;
    all << std::ifstream(file_).rdbuf();
    return all.str();
  }
  std::string folder_, file_;
};

TEST_F(ErrorFile, HasTheFormatOfTorchrun) {
  EXPECT_EQ(detail::error_file_text("a \"b\"\n\x01", 12),
            "{\"message\":{\"message\":\"a \\\"b\\\"\\u000a\\u0001\",\"extraInfo\":{\"timestamp\":\"12\"}}}\n");
}

TEST_F(ErrorFile, KeepsTheFirstError) {
  try {
    TESSERA_FAIL(UsageError, "first");
  } catch (const std::exception& error) {
    record_error(error);
  }
  record_error(std::runtime_error("second"));
  EXPECT_EQ(detail::message_in(text()), "tessera::UsageError: first");  // without backtrace
}

// A rank that fails because of another one names it, but only for the error that the note is about.
TEST_F(ErrorFile, NamesTheCulprit) {
  detail::note_culprit(2, "rank 2 has died");
  EXPECT_EQ(detail::culprit_of("rank 0, allreduce_ #1: rank 2 has died; it was late"), 2);
  EXPECT_EQ(detail::culprit_of("disk full"), -1);
  record_error(std::runtime_error("rank 0: rank 2 has died"));
  EXPECT_EQ(detail::culprit_in(text()), 2);
  EXPECT_EQ(detail::message_in(text()), "std::runtime_error: rank 0: rank 2 has died");
  for (const char* other : {"", "{}", R"({"message":"x"})", R"({"message":{"extraInfo":{"culprit":"x"}}})"})
    EXPECT_EQ(detail::culprit_in(other), -1);
}

// The other ranks fail because of the callback. The launcher must find the older file first.
TEST_F(ErrorFile, IsWrittenBeforeTheOtherRanksAreNotified) {
  static std::string file_at_callback;
  static std::string path;
  path = file_;
  set_error_callback([](const std::string&) {
    std::ostringstream all;
    all << std::ifstream(path).rdbuf();
    file_at_callback = all.str();
  });
  record_error(std::runtime_error("why"));
  set_error_callback(nullptr);
  EXPECT_EQ(detail::message_in(file_at_callback), "std::runtime_error: why");
}

TEST_F(ErrorFile, IsNotWrittenWithoutTheVariable) {
  unsetenv("TORCHELASTIC_ERROR_FILE");
  record_error(std::runtime_error("x"));
  EXPECT_EQ(text(), "");
}

TEST_F(ErrorFile, InnermostMessageIsFound) {
  EXPECT_EQ(detail::message_in(detail::error_file_text("a \"b\"\n\\c", 1)), "a \"b\"\n\\c");
  EXPECT_EQ(detail::message_in(R"({"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "t"}}})"),
            "ValueError: x");
  EXPECT_EQ(detail::message_in(R"({"message":"killed\ttwice"})"), "killed\ttwice");
  for (const char* broken : {"", "{}", R"({"message": 3})", R"({"message": "incomplete \)"})
    EXPECT_EQ(detail::message_in(broken), "");
}

void throw_uncaught(const std::function<void()>& thrower) {
  record_uncaught_errors();
  record_uncaught_errors();
  [&]() noexcept { thrower(); }();
}
const std::function<void()> kThrowFar = [] { throw std::out_of_range("far"); };
const std::function<void()> kThrowUsage = [] { TESSERA_FAIL(UsageError, "far"); };

using ErrorFileDeathTest = ErrorFile;
TEST_F(ErrorFileDeathTest, UncaughtErrorsAreShownOnce) {
  const auto aborts = ::testing::KilledBySignal(SIGABRT);
  EXPECT_EXIT(throw_uncaught(kThrowFar), aborts, "^$");  // the launcher shows it
  EXPECT_EQ(detail::message_in(text()), "std::out_of_range: far");
  EXPECT_EXIT(throw_uncaught(kThrowFar), aborts, "^std::out_of_range: far\n$");  // the file keeps the first error
  unsetenv("TORCHELASTIC_ERROR_FILE");
  EXPECT_EXIT(throw_uncaught(kThrowUsage), aborts, "^tessera::UsageError: far\n$");  // without a backtrace
  setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1);
  EXPECT_EXIT(throw_uncaught(kThrowUsage), aborts, "^tessera::UsageError: far\nException raised from ");
  unsetenv("TORCH_SHOW_CPP_STACKTRACES");
  EXPECT_EXIT(
      {
        std::set_terminate([] { std::fprintf(stderr, "own handler\n"), std::_Exit(9); });
        throw_uncaught(kThrowUsage);
      },
      ::testing::ExitedWithCode(9), "own handler");
}

}  // namespace
}  // namespace tessera
