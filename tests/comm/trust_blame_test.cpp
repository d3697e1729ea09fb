// Which rank an error blames. Every rank of the group must name the same one: the rank that differs from most ranks.
#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/detail/odd_rank_out.h"
#include "tessera/comm/detail/rank_agreement.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::comm {
namespace {

using testing::Rank;
using testing::run_ranks;

int odd_of(const std::string& values) {
  return odd_rank_out(static_cast<int>(values.size()),
                      [&](int a, int b) { return values[static_cast<size_t>(a)] == values[static_cast<size_t>(b)]; });
}

TEST(OddRankOut, IsTheFirstThatDiffersFromAMajority) {
  for (const char* same : {"", "a", "aa", "aaaa"}) EXPECT_EQ(odd_of(same), -1) << same;
  for (const char* split : {"ab", "abc", "aabb", "aabbc"}) EXPECT_EQ(odd_of(split), -1) << split;
  EXPECT_EQ(odd_of("baa"), 0);
  EXPECT_EQ(odd_of("aba"), 1);
  EXPECT_EQ(odd_of("aaab"), 3);
  EXPECT_EQ(odd_of("abaca"), 1);
}

// What one rank posts instead of the all_reduce of four floats.
struct WrongPost {
  const char* name;
  void (*run)(Communicator&);
};
constexpr WrongPost kWrongPosts[] = {
    {"size",
     [](Communicator& group) {
       at::Tensor x = at::ones({5});
       group.all_reduce(x, ReduceOp::Sum).wait();
     }},
    {"dtype",
     [](Communicator& group) {
       at::Tensor x = at::ones({4}, at::kInt);
       group.all_reduce(x, ReduceOp::Sum).wait();
     }},
    {"reduction",
     [](Communicator& group) {
       at::Tensor x = at::ones({4});
       group.all_reduce(x, ReduceOp::Max).wait();
     }},
    {"kind", [](Communicator& group) { group.barrier().wait(); }},
    {"size of a large input",
     [](Communicator& group) {
       at::Tensor x = at::ones({1 << 20});
       group.all_reduce(x, ReduceOp::Sum).wait();
     }},
};

TEST(Blame, EveryRankNamesTheOneThatDiffers) {
  for (const auto& wrong : kWrongPosts)
    for (const int64_t n : {3, 4})
      for (int64_t odd = 0; odd < n; odd++) {
        SCOPED_TRACE(c10::str(wrong.name, " on rank ", odd, " of ", n));
        run_ranks(n, [&](Rank& me) {
          at::Tensor x = at::ones({4});
          try {
            if (me.rank == odd)
              wrong.run(*me.group());
            else
              me.group()->all_reduce(x, ReduceOp::Sum).wait();
            ADD_FAILURE() << "no error on rank " << me.rank;
          } catch (const CommError& error) {
            const std::string text = error.what_without_backtrace();
            EXPECT_CONTAINS(text, c10::str("rank ", odd, " differs from most ranks: "));
            EXPECT_EQ(tessera::detail::culprit_of(text), odd) << text;
          }
        });
      }
}

// Two ranks have no majority: both are named, and none is blamed.
TEST(Blame, TwoRanksHaveNoMajority) {
  run_ranks(2, [](Rank& me) {
    at::Tensor x = at::ones({4 + me.rank});
    try {
      me.group()->all_reduce(x, ReduceOp::Sum).wait();
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      const std::string text = error.what_without_backtrace();
      EXPECT_CONTAINS(text, "rank 0");
      EXPECT_CONTAINS(text, "rank 1");
      EXPECT_EQ(text.find("differs from most"), std::string::npos) << text;
    }
  });
}

TEST(Blame, AgreementNamesTheOneThatDiffers) {
  for (int64_t odd = 0; odd < 3; odd++)
    run_ranks(3, [&](Rank& me) {
      const std::string own = me.rank == odd ? "other" : "same";
      const auto call = [&] { require_same_on_all_ranks(me.group(), "a test", {"first", own}); };
      EXPECT_ERROR(UsageError, call(), c10::str("Rank ", odd, " has 'other' where "),
                   std::string(" has 'same' (line 2 of 2"));
    });
}

TEST(Blame, WorldAbortNamesTheCaller) {
  run_ranks(3, [](Rank& me) {
    at::Tensor x = at::ones({4});
    if (me.rank == 1) me.world.abort("I give up");
    EXPECT_ERROR(CommError, me.group()->all_reduce(x, ReduceOp::Sum).wait(), "rank 1 called World::abort: I give up");
    EXPECT_EQ(tessera::detail::culprit_of("x: rank 1 called World::abort: I give up"), 1);
  });
}

}  // namespace
}  // namespace tessera::comm
