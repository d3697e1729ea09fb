// `tessera selftest`: passes here, and names planted faults.
#include "tessera/cli/selftest.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>

namespace tessera::cli {
namespace {

std::vector<SelftestResult> selftest_with(const std::string& fault) {
  std::vector<SelftestResult> results;
  testing::run_ranks(4, [&](testing::Rank& me) {
    auto mine = run_selftest(me.world, at::kCPU, parse_selftest_fault(fault));
    if (me.rank == 2) results = std::move(mine);
  });
  return results;
}
std::string error_of(const std::vector<SelftestResult>& results, const std::string& name) {
  for (const auto& result : results)
    if (result.name == name) return result.error;
  return "no such check";
}

TEST(Selftest, PassesOnThreads) {
  const auto results = selftest_with("");
  EXPECT_EQ(results.size(), 18u);
  for (const auto& result : results) EXPECT_EQ(result.error, "") << result.name;
}

TEST(Selftest, NamesAWrongRank) {
  const auto results = selftest_with("wrong:2");
  EXPECT_CONTAINS(error_of(results, "values of each rank"), "rank 2 on ");
  EXPECT_CONTAINS(error_of(results, "values of each rank"), "sends wrong values: 4 of 4");
  EXPECT_CONTAINS(error_of(results, "all_reduce sum"), "element 3");
  EXPECT_EQ(error_of(results, "links between ranks"), "");
}

TEST(Selftest, NamesASlowLink) {
  const auto results = selftest_with("slow:1-3");
  const auto error = error_of(results, "links between ranks");
  EXPECT_CONTAINS(error, "between rank 1 on ");
  EXPECT_CONTAINS(error, "and rank 3 on ");
  EXPECT_EQ(error.find("rank 2"), std::string::npos) << error;
  EXPECT_EQ(error_of(results, "values of each rank"), "");
}

TEST(Selftest, FaultText) {
  EXPECT_EQ(parse_selftest_fault("wrong:12").wrong_rank, 12);
  EXPECT_EQ(parse_selftest_fault("slow:1-3").slow_to, 3);
  EXPECT_EQ(parse_selftest_fault("wrong:2,slow:1-3").wrong_rank, 2);
  EXPECT_EQ(parse_selftest_fault("wrong:2,slow:1-3").slow_from, 1);
  for (const auto* text :
       {"wrong", "wrong:x", "slow:3-1", "slow:1", "late:1", "wrong:-1", "wrong:1,late:2", ",wrong:1"})
    EXPECT_ERROR(UsageError, parse_selftest_fault(text), "--plant", text);
}

}  // namespace
}  // namespace tessera::cli
