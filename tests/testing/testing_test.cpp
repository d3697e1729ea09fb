// Tests of tessera/testing itself: failures are detected and reported.
#include "tessera/testing/assert_close.h"
#include "tessera/testing/detail/counting_allocator.h"
#include "tessera/testing/detail/file_check.h"
#include "tessera/testing/detail/subtests.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/AutogradState.h>
#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

namespace tessera::testing {
namespace {

TEST(RunRanks, EachRankHasItsOwnCurrentWorld) {
  std::atomic<int> ran{0};
  run_ranks(3, [&](Rank& me) {
    EXPECT_EQ(World::current().rank(), me.rank);
    EXPECT_EQ(me.size(), 3);
    EXPECT_TRUE(c10::AutogradState::get_tls_state().get_view_replay_enabled());
    EXPECT_EQ(at::get_num_threads(), 1);
    ran++;
  });
  EXPECT_EQ(ran, 3);
  EXPECT_FALSE(World::has_current());
}

// LibTorch has one default generator per process. Ranks that are threads draw what ranks that are processes draw.
TEST(RunRanks, EachRankHasItsOwnDefaultGenerator) {
  at::manual_seed(5);
  const auto expected = at::rand({1000}), next = at::rand({10});
  at::manual_seed(5);
  EXPECT_TRUE(at::rand({1000}).equal(expected));
  std::vector<at::Tensor> unseeded(4);
  run_ranks(4, [&](Rank& me) {
    unseeded[static_cast<size_t>(me.rank)] = at::rand({10});
    for (int i = 0; i < 50; i++) {
      at::manual_seed(5);
      ASSERT_TRUE(at::rand({1000}).equal(expected)) << i;
      ASSERT_TRUE(at::rand({10}).equal(next)) << i;
      at::randperm(100);
      at::dropout(expected, 0.5, true);
    }
  });
  EXPECT_TRUE(at::rand({10}).equal(next)) << "the generator of the caller was used";
  for (size_t r = 1; r < unseeded.size(); r++) EXPECT_FALSE(unseeded[r].equal(unseeded[0]));
}

TEST(RunRanks, FailedExpectationsInARankFailTheTest) {
  EXPECT_NONFATAL_FAILURE_ON_ALL_THREADS(run_ranks(2, [](Rank& me) { EXPECT_EQ(me.rank, 0) << "on purpose"; }),
                                         "on purpose");
}

TEST(RunRanks, ReportsEveryFailedRankInOrder) {
  try {
    run_ranks(3, [](Rank& me) {
      me.group()->barrier().wait();
      throw std::runtime_error("error of rank " + std::to_string(me.rank));
    });
    FAIL();
  } catch (const std::exception& error) {
    FileCheck()
        .check("3 of 3 ranks failed")
        .check("error of rank 0")
        .check("error of rank 1")
        .check("error of rank 2")
        .run(error.what());
  }
}

TEST(Close, TolerancesByDtype) {
  EXPECT_EQ(close(at::ones({2}), at::ones({2}) + 1e-6), "");
  EXPECT_NE(close(at::ones({2}), at::ones({2}) + 1e-4), "");
  EXPECT_NE(close(at::ones({2}, at::kDouble), at::ones({2}, at::kDouble) + 1e-6), "");
  EXPECT_EQ(close(at::ones({2}, at::kBFloat16), at::full({2}, 1.01, at::kBFloat16)), "");
  EXPECT_NE(close(at::ones({2}, at::kHalf), at::full({2}, 1.01, at::kHalf)), "");
  EXPECT_NE(close(at::full({1}, 5, at::kLong), at::full({1}, 6, at::kLong)), "");
  EXPECT_EQ(close(at::full({1}, NAN), at::full({1}, NAN)), "");
  EXPECT_EQ(close(at::ones({2, 3}).t(), at::ones({3, 2})), "");
}

TEST(Close, ReportsTheDifference) {
  EXPECT_EQ(close(at::ones({2}), at::ones({3})), "shape [2], expected [3]");
  EXPECT_EQ(close(at::ones({2}), at::ones({2}, at::kDouble)), "dtype Float, expected Double");
  EXPECT_EQ(close(at::Tensor(), at::ones({2})), "actual is undefined");
  at::Tensor x = at::zeros({2, 2});
  x[1][0] = 3;
  EXPECT_NE(close(x, at::zeros({2, 2})).find("1 of 4 elements differ"), std::string::npos);
  EXPECT_NE(close(x, at::zeros({2, 2})).find("first at [1,0]: 3, expected 0"), std::string::npos);
  EXPECT_NE(close({x, x}, {x, at::zeros({2, 2})}).find("tensor 1: "), std::string::npos);
  EXPECT_THROW(assert_close(x, at::zeros({2, 2})), std::runtime_error);
  EXPECT_EQ(close(x, at::zeros({2, 2}), {.relative = 0, .absolute = 3}), "");
}

TEST(FileCheckTest, ChecksPatternsInOrder) {
  const char* text = "a = mm(x)\nb = relu(a)\nc = mm(b)\nreturn c\n";
  EXPECT_EQ(FileCheck().check("mm").check("relu").check_next("mm").check_same("(b)").find_error(text), "");
  EXPECT_NE(FileCheck().check("relu").check("relu").find_error(text), "");
  EXPECT_NE(FileCheck().check("mm").check_next("return").find_error(text), "");
  EXPECT_NE(FileCheck().check("b =").check_same("mm").find_error(text), "");
  EXPECT_NE(FileCheck().check("mm").check_not("relu").check("return").find_error(text), "");
  EXPECT_EQ(FileCheck().check("relu").check_not("relu").find_error(text), "");
  EXPECT_EQ(FileCheck().check_count("mm", 2, true).find_error(text), "");
  EXPECT_NE(FileCheck().check_count("mm", 3).find_error(text), "");
  EXPECT_NE(FileCheck().check_count("=", 2, true).find_error(text), "");
  EXPECT_THROW(FileCheck().check("add").run(text), std::runtime_error);
}

TEST(CountingAllocatorTest, LiveAndPeak) {
  at::Tensor kept;
  {
    CountingAllocator count;
    at::Tensor a = at::empty({1000});
    EXPECT_EQ(count.live_bytes(), 4000);
    at::empty({5000});
    EXPECT_EQ(count.live_bytes(), 4000);
    EXPECT_EQ(count.peak_bytes(), 24000);
    count.reset_peak();
    EXPECT_EQ(count.peak_bytes(), 4000);
    EXPECT_EQ(count.allocations(), 2);
    kept = a;
  }
  CountingAllocator again;
  kept.reset();  // allocated in an earlier scope
  EXPECT_EQ(again.live_bytes(), 0);
}

TEST(Subtests, RunAllAndReportEach) {
  std::vector<std::string> ran;
  try {
    subtests(
        [&](int a, const std::string& b) {
          ran.push_back(std::to_string(a) + b);
          if (a == 2) throw std::runtime_error("two");
        },
        std::vector<int>{1, 2}, std::vector<std::string>{"x", "y"});
    FAIL();
  } catch (const std::exception& error) {
    FileCheck().check("2 of 4 sub-tests").check("(2, x): two").check("(2, y): two").run(error.what());
  }
  EXPECT_EQ(ran, (std::vector<std::string>{"1x", "1y", "2x", "2y"}));
}

}  // namespace
}  // namespace tessera::testing
