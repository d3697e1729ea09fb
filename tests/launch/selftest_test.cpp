// `tessera selftest` with ranks that are processes.
#include "tessera/testing/expect_error.h"
#include "tests/launch/shell.h"

#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

const std::string kSelftest = "cd $(mktemp -d) && trap 'rm -rf $PWD' EXIT; \"$TESSERA\" selftest -n 2 ";

TEST(SelftestProgram, PassesOverThreadsShmAndGloo) {
  const auto ran = shell(kSelftest + "&& grep -c passed tessera-selftest.txt");
  EXPECT_EQ(ran.exit_code, 0) << ran.text;
  for (const char* title : {"2 ranks over threads", "2 ranks over shm", "2 ranks over gloo", "All checks passed"})
    EXPECT_CONTAINS(ran.text, title);
  EXPECT_CONTAINS(ran.text, "\n55\n");  // three times 18, and the failing rank
}

TEST(SelftestProgram, NamesAPlantedFault) {
  const auto ran = shell(kSelftest + "--backends shm --plant wrong:1");
  EXPECT_EQ(ran.exit_code, 1) << ran.text;
  EXPECT_CONTAINS(ran.text, "rank 1 on ");
  EXPECT_CONTAINS(ran.text, "sends wrong values: 2 of 2");
  EXPECT_CONTAINS(ran.text, "the report is in tessera-selftest.txt");
}

}  // namespace
}  // namespace tessera::testing
