#include "tessera/base/error.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

TEST(Check, DoesNothingIfTrue) { TESSERA_CHECK(1 + 1 == 2, UsageError, "not shown"); }

TEST(Check, ThrowsTheGivenKind) {
  EXPECT_THROW(TESSERA_CHECK(false, UsageError, "x"), UsageError);
  EXPECT_THROW(TESSERA_CHECK(false, ShardingError, "x"), ShardingError);
  EXPECT_THROW(TESSERA_CHECK(false, CommError, "x"), CommError);
  EXPECT_THROW(TESSERA_FAIL(InternalError, "x"), InternalError);
}

TEST(Check, ErrorsAreC10Errors) { EXPECT_THROW(TESSERA_FAIL(CommError, "x"), c10::Error); }

TEST(Check, InternalErrorsAskForAReport) {
  try {
    TESSERA_FAIL(InternalError, "x");
  } catch (const InternalError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "x (internal error, please report)");
  }
}

TEST(Check, BuildsTheMessageOnlyOnFailure) {
  int evaluated = 0;
  auto count = [&] { return ++evaluated; };
  TESSERA_CHECK(true, UsageError, "axis ", count());
  EXPECT_EQ(evaluated, 0);
  try {
    TESSERA_CHECK(false, UsageError, "axis ", count(), " of ", 2, " was asked for");
    FAIL() << "did not throw";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what_without_backtrace(), "axis 1 of 2 was asked for");
    EXPECT_NE(std::string(error.what()).find("error_test.cpp"), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera
