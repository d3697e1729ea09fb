// Passes that remove, merge or move collectives, each by text. What differs between ranks also runs on ranks.
#include "expect_rewrite.h"

#include "tessera/comm/functional_collectives.h"
#include "tessera/compile/api/compile.h"
#include "tessera/debug/comm_debug_mode.h"
#include "tessera/testing/ranks.h"

namespace tessera::compiler {
namespace {

using testing::Rank;
using testing::run_ranks;

TEST(CancelCollectives, RemovesCollectivesOfGroupsOfOneRank) {
  expect_rewrite("cancel_collectives", R"(group @dp [3]
input %0: f32[4] argument "0"
%1: f32[4] = tessera.all_reduce(%0, "avg", @dp)
%2: f32[4] in %1 = tessera.wait(%1!, @dp)
%3: f32[2, 2] in %1 = aten.view(%2, [2, 2])
%4: f32[2, 2] = aten.neg(%3)
%5: f32[4] = tessera.all_gather(%0, 0, [4], @dp)
%6: f32[4] in %5 = tessera.wait(%5!, @dp)
return %4
return %6
)",
                 R"(group @dp [3]
input %0: f32[4] argument "0"
%1: f32[2, 2] in %0 = aten.view(%0, [2, 2])
%2: f32[2, 2] = aten.neg(%1)
%3: f32[4] = aten.clone(%0, 0)
return %2
return %3
)");
}

TEST(CancelCollectives, LocalShardOfAnAllGatherIsItsInput) {
  const std::string gather = R"( rank 1
input %0: f32[2, 3] argument "0"
%1: f32[5, 3] = tessera.all_gather(%0, 0, [3, 2], @dp)
%2: f32[5, 3] in %1 = tessera.wait(%1!, @dp)
[%3: f32[3, 3] in %1, %4: f32[2, 3] in %1 + 9] = aten.split_with_sizes(%2, [3, 2], 0)
)";
  expect_rewrite("cancel_collectives", "group @dp [0, 1]" + gather + "%5: f32[2, 3] = aten.neg(%4)\nreturn %5\n",
                 R"(group @dp [0, 1] rank 1
input %0: f32[2, 3] argument "0"
%1: f32[2, 3] = aten.neg(%0)
return %1
)");
  // The shard of another rank is used as well, so the all-gather stays.
  EXPECT_EQ(matches("cancel_collectives",
                    "group @dp [0, 1]" + gather + "%5: f32[3, 3] = aten.neg(%3)\n%6: f32[2, 3] = aten.neg(%4)\n"),
            0);
}

TEST(CancelCollectives, AllGatherOfAShardOfAReplicatedTensor) {
  expect_rewrite("cancel_collectives", R"(group @dp [0, 1] rank 0
input %0: f32[4, 3] argument "0"
%1: f32[4, 3] = tessera.all_reduce(%0, "sum", @dp)
%2: f32[4, 3] in %1 = tessera.wait(%1!, @dp)
%3: f32[2, 3] in %1 = aten.slice.Tensor(%2, 0, 0, 2, 1)
%4: f32[4, 3] = tessera.all_gather(%3, 0, [2, 2], @dp)
%5: f32[4, 3] in %4 = tessera.wait(%4!, @dp)
%6: f32[4, 3] = aten.neg(%5)
%7: f32[4, 3] = tessera.all_reduce(%2, "max", @dp)
%8: f32[4, 3] in %7 = tessera.wait(%7!, @dp)
%9: f32[4, 3] = aten.exp(%8)
return %6
return %9
)",
                 R"(group @dp [0, 1] rank 0
input %0: f32[4, 3] argument "0"
%1: f32[4, 3] = tessera.all_reduce(%0, "sum", @dp)
%2: f32[4, 3] in %1 = tessera.wait(%1!, @dp)
%3: f32[2, 3] in %1 = aten.slice.Tensor(%2, 0, 0, 2, 1)
%4: f32[4, 3] = aten.neg(%2)
%5: f32[4, 3] = aten.exp(%2)
return %4
return %5
)");
}

TEST(CancelCollectives, EqualAllReducesBecomeOne) {
  expect_rewrite("cancel_collectives", R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%2: f32[4] in %1 = tessera.wait(%1!, @dp)
%3: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%4: f32[4] in %3 = tessera.wait(%3!, @dp)
%5: f32[4] = aten.add.Tensor(%2, %4, 1)
return %5
)",
                 R"(group @dp [0, 1]
input %0: f32[4] argument "0"
%1: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%2: f32[4] in %1 = tessera.wait(%1!, @dp)
%3: f32[4] = aten.add.Tensor(%2, %2, 1)
return %3
)");
}

// own = false: both ranks read rows 0 and 1. These are the local shard of rank 0 but not of rank 1, so both ranks must
// keep the all-gather.
TEST(CancelCollectives, RanksDecideTogether) {
  run_ranks(2, [](Rank& me) {
    const auto& group = me.world.group();
    for (const bool own : {true, false}) {
      auto step = compile(
          [&](const at::Tensor& x) {
            const auto all = funcol::all_gather(x, 0, {2, 2}, group);
            funcol::wait(all, group);
            return all.narrow(0, own ? 2 * me.rank : 0, 2).neg();
          },
          {.passes = PassList{"cancel_collectives"}, .verified = true});
      const auto x = torch::full({2, 3}, me.rank + 1);
      const auto found = step(x);
      EXPECT_TRUE(at::equal(found, own ? -x : -torch::ones_like(x))) << me.rank;
      EXPECT_EQ(step.listing().find("all_gather") == std::string::npos, own);
    }
  });
}

TEST(MergeCollectives, CoalescesIndependentCollectivesUpToALimit) {
  const std::string reductions = R"(group @dp [0, 1]
group @tp [0, 2]
input %0: f32[4] argument "0"
input %1: f32[2, 3] argument "1"
%2: f32[4] = aten.neg(%0)
%3: f32[4] = tessera.all_reduce(%2, "sum", @dp)
%4: f32[4] in %3 = tessera.wait(%3!, @dp)
%5: f32[4] = aten.exp(%4)
%6: f32[2, 3] = aten.neg(%1)
%7: f32[2, 3] = tessera.all_reduce(%6, "sum", @dp)
%8: f32[2, 3] in %7 = tessera.wait(%7!, @dp)
%9: f32[2, 3] = tessera.all_reduce(%8, "sum", @dp)
%10: f32[2, 3] in %9 = tessera.wait(%9!, @dp)
%11: f32[4, 3] = tessera.all_gather(%1, 0, [2, 2], @tp)
%12: f32[8] = tessera.all_gather(%0, 0, [4, 4], @tp)
%13: f32[4, 3] in %11 = tessera.wait(%11!, @tp)
%14: f32[8] in %12 = tessera.wait(%12!, @tp)
return %5
return %10
return %13
return %14
)";
  expect_rewrite("merge_collectives", reductions,
                 R"(group @dp [0, 1]
group @tp [0, 2]
input %0: f32[4] argument "0"
input %1: f32[2, 3] argument "1"
%2: f32[4] = aten.neg(%0)
%3: f32[2, 3] = aten.neg(%1)
[%4: f32[4], %5: f32[2, 3]] = tessera.all_reduce_coalesced([%2, %3], "sum", @dp)
%6: f32[4] in %4 = tessera.wait(%4!, @dp)
%7: f32[4] = aten.exp(%6)
%8: f32[2, 3] in %5 = tessera.wait(%5!, @dp)
%9: f32[2, 3] = tessera.all_reduce(%8, "sum", @dp)
%10: f32[2, 3] in %9 = tessera.wait(%9!, @dp)
[%11: f32[4, 3], %12: f32[8]] = tessera.all_gather_coalesced([%1, %0], [0, 0], [2, 2, 4, 4], @tp)
%13: f32[4, 3] in %11 = tessera.wait(%11!, @tp)
%14: f32[8] in %12 = tessera.wait(%12!, @tp)
return %7
return %10
return %13
return %14
)");
  EXPECT_EQ(matches("merge_collectives(bytes=39)", reductions), 0);
  EXPECT_EQ(matches("merge_collectives(bytes=40)", reductions), 1);
}

TEST(MergeCollectives, ValuesOnTwoRanks) {
  run_ranks(2, [](Rank& me) {
    const auto& group = me.world.group();
    auto step = compile(
        [&](const at::Tensor& x, const at::Tensor& y) {
          const auto a = funcol::all_reduce(x, ReduceOp::Sum, group), b = funcol::all_reduce(y, ReduceOp::Sum, group);
          funcol::wait(a, group);
          funcol::wait(b, group);
          const auto c = funcol::reduce_scatter(a, 0, {2, 1}, ReduceOp::Sum, group);
          const auto d = funcol::reduce_scatter(b, 1, {2, 2}, ReduceOp::Sum, group);
          funcol::wait(c, group);
          funcol::wait(d, group);
          return std::make_pair(c, d);
        },
        {.passes = PassList{"merge_collectives"}, .verified = true});
    const auto x = torch::arange(6.).reshape({3, 2}), y = torch::arange(8.).reshape({2, 4});
    CommDebugMode comm;
    const auto [c, d] = step(x, y);
    EXPECT_TRUE(at::equal(c, 4 * x.narrow(0, 2 * me.rank, 2 - me.rank)));
    EXPECT_TRUE(at::equal(d, 4 * y.narrow(1, 2 * me.rank, 2)));
    const auto listing = step.listing();
    EXPECT_NE(listing.find("all_reduce_coalesced"), std::string::npos) << listing;
    EXPECT_NE(listing.find("reduce_scatter_tensor_coalesced"), std::string::npos) << listing;
  });
}

TEST(PlaceRedistributes, MovesAllGathersOverCastsAndPointwiseOps) {
  expect_rewrite("place_redistributes", R"(group @dp [0, 1]
input %0: f32[2, 3] argument "0"
input %1: bf16[2, 3] argument "1"
%2: f32[4, 3] = tessera.all_gather(%0, 0, [2, 2], @dp)
%3: f32[4, 3] in %2 = tessera.wait(%2!, @dp)
%4: f32[3, 4]{1, 3} in %2 = aten.t(%3)
%5: bf16[3, 4]{1, 3} = aten._to_copy(%4, 15, none, none, none, false, none)
%6: bf16[3, 4]{1, 3} = aten.neg(%5)
%7: f32[2, 3] = aten._to_copy(%1, 6, none, none, none, false, none)
%8: f32[4, 3] = tessera.all_gather(%7, 0, [2, 2], @dp)
%9: f32[4, 3] in %8 = tessera.wait(%8!, @dp)
%10: f32[12] in %8 = aten.view(%9, [12])
return %6
return %10
)",
                 R"(group @dp [0, 1]
input %0: f32[2, 3] argument "0"
input %1: bf16[2, 3] argument "1"
%2: bf16[2, 3] = aten._to_copy(%0, 15, none, none, none, false, none)
%3: bf16[4, 3] = tessera.all_gather(%2, 0, [2, 2], @dp)
%4: bf16[4, 3] in %3 = tessera.wait(%3!, @dp)
%5: bf16[3, 4]{1, 3} in %3 = aten.t(%4)
%6: bf16[3, 4]{1, 3} = aten.neg(%5)
%7: bf16[4, 3] = tessera.all_gather(%1, 0, [2, 2], @dp)
%8: bf16[4, 3] in %7 = tessera.wait(%7!, @dp)
%9: f32[4, 3] = aten._to_copy(%8, 6, none, none, none, false, none)
%10: f32[12] in %9 = aten.view(%9, [12])
return %6
return %10
)");
  expect_rewrite("place_redistributes", R"(group @dp [0, 1]
input %0: f32[2, 3] argument "0"
%1: f32[4, 3] = tessera.all_gather(%0, 0, [2, 2], @dp)
%2: f32[4, 3] in %1 = tessera.wait(%1!, @dp)
%3: f32[4, 3] = aten.relu(%2)
%4: f32[] = aten.sum(%3, none)
return %4
)",
                 R"(group @dp [0, 1]
input %0: f32[2, 3] argument "0"
%1: f32[2, 3] = aten.relu(%0)
%2: f32[4, 3] = tessera.all_gather(%1, 0, [2, 2], @dp)
%3: f32[4, 3] in %2 = tessera.wait(%2!, @dp)
%4: f32[] = aten.sum(%3, none)
return %4
)");
}

TEST(PlaceRedistributes, MovesAllReducesOverLinearOps) {
  const std::string sums = R"(group @dp [0, 1]
input %0: f32[4] argument "0"
input %1: f32[4] argument "1"
%2: f32[4] = tessera.all_reduce(%0, "sum", @dp)
%3: f32[4] in %2 = tessera.wait(%2!, @dp)
%4: f32[4] = aten.mul.Tensor(%3, 2)
%5: f32[4] = tessera.all_reduce(%1, "sum", @dp)
%6: f32[4] in %5 = tessera.wait(%5!, @dp)
%7: f32[4] = aten.add.Tensor(%4, %6, 1)
%8: f32[4] = aten.exp(%7)
return %8
)";
  expect_rewrite("place_redistributes", sums,
                 R"(group @dp [0, 1]
input %0: f32[4] argument "0"
input %1: f32[4] argument "1"
%2: f32[4] = aten.mul.Tensor(%0, 2)
%3: f32[4] = aten.add.Tensor(%2, %1, 1)
%4: f32[4] = tessera.all_reduce(%3, "sum", @dp)
%5: f32[4] in %4 = tessera.wait(%4!, @dp)
%6: f32[4] = aten.exp(%5)
return %6
)");
  auto maxima = sums;  // max is not linear
  for (size_t at; (at = maxima.find("\"sum\"")) != std::string::npos;) maxima.replace(at, 5, "\"max\"");
  EXPECT_EQ(matches("place_redistributes", maxima), 0);
  EXPECT_EQ(matches("place_redistributes", sums + "return %3\n"), 0);  // %3 has another use
}

}  // namespace
}  // namespace tessera::compiler
