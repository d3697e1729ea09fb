#include "tessera/comm/detail/rank_agreement.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <stdexcept>

namespace tessera::comm {
namespace {

using testing::error_message;
using testing::Rank;
using testing::run_ranks;

TEST(RequireSameOnAllRanks, ReturnsIfAllRanksPassTheSame) {
  for (const int64_t ranks : {1, 2, 4})
    run_ranks(ranks, [](Rank& me) {
      const auto before = me.group()->sequence();
      for (int i = 0; i < 3; i++) require_same_on_all_ranks(me.group(), "a test", {"one", c10::str("two ", i)});
      EXPECT_EQ(me.group()->sequence(), before);  // no collective was posted
    });
}

TEST(RequireSameOnAllRanks, EveryRankThrowsTheDifference) {
  run_ranks(4, [](Rank& me) {
    const auto error_of = [&](std::vector<std::string> lines) {
      return error_message<UsageError>([&] { require_same_on_all_ranks(me.group(), "a test", lines); });
    };
    EXPECT_CONTAINS(
        error_of({"one", me.rank == 2 ? "three" : "two"}),
        "a test: the ranks of group 'world' differ. Rank 2 has 'three' where the first rank has 'two' (line 2 "
        "of 2; the first "
        "rank is rank 0)");
    EXPECT_CONTAINS(error_of(me.rank >= 2 ? std::vector<std::string>{"one"} : std::vector<std::string>{"one", "two"}),
                    "Rank 2 has only 1 line(s) where the first rank has 'two'");
    EXPECT_CONTAINS(error_of({"it", "goes", "on"}), "nothing was thrown");
  });
}

TEST(BroadcastText, ReturnsTheTextOfRankZero) {
  run_ranks(3, [](Rank& me) {
    EXPECT_EQ(broadcast_text(me.group(), "a test", c10::str("rank ", me.rank)), "rank 0");
    EXPECT_EQ(broadcast_text(me.group(), "a test", c10::str("again ", me.rank)), "again 0");
  });
}

TEST(GatherDecideBroadcast, RankZeroDecidesFromAllTexts) {
  for (const int64_t ranks : {1, 3})
    run_ranks(ranks, [](Rank& me) {
      for (int i = 0; i < 3; i++) {
        const auto decide = [&](const std::vector<std::string>& all) {
          EXPECT_EQ(me.rank, 0);
          std::string text;
          for (const auto& one : all) text += one;
          return text + std::to_string(i);
        };
        EXPECT_EQ(gather_decide_broadcast(
                      me.group(), "a test", [&] { return std::to_string(me.rank); }, decide),
                  (me.size() == 1 ? "0" : "012") + std::to_string(i));
      }
    });
}

TEST(GatherDecideBroadcast, AnErrorOnOneRankIsThrownOnAllRanks) {
  run_ranks(4, [](Rank& me) {
    const auto none = [](const auto&) -> std::string { throw std::logic_error("decide() must not be called"); };
    const auto fail_on = [&](std::vector<int64_t> ranks, const std::string& text) {
      return [&me, ranks, text] {
        for (const int64_t rank : ranks) TESSERA_CHECK(rank != me.rank, CommError, text);
        return std::string();
      };
    };
    EXPECT_EQ(error_message<UsageError>([&] {
                gather_decide_broadcast(me.group(), "a test", fail_on({1, 3}, "no disk"), none);
              }),
              "a test: ranks 1, 3: no disk");
    EXPECT_EQ(error_message<UsageError>([&] {
                gather_decide_broadcast(me.group(), "a test", fail_on({0, 1, 2, 3}, "no disk"), none);
              }),
              "a test: no disk");
    EXPECT_EQ(error_message<UsageError>([&] {
                gather_decide_broadcast(
                    me.group(), "a test", [&] { return std::string(); },
                    [](const auto&) -> std::string { throw std::runtime_error("no name"); });
              }),
              "a test: no name");
    EXPECT_EQ(gather_decide_broadcast(
                  me.group(), "a test", [] { return std::string(); }, [](const auto&) { return std::string("on"); }),
              "on");
  });
}

TEST(GatherDecideBroadcast, LeavesNoKeysInTheStore) {
  run_ranks(2, [](Rank& me) {
    const auto once = [&] {
      gather_decide_broadcast(
          me.group(), "a test", [] { return std::string(100, 'x'); }, [](const auto&) { return std::string(); });
    };
    once();
    me.group()->barrier().wait();
    const auto before = me.group()->store()->getNumKeys();
    me.group()->barrier().wait();
    for (int i = 0; i < 5; i++) once();
    me.group()->barrier().wait();
    EXPECT_EQ(me.group()->store()->getNumKeys(), before);
    me.group()->barrier().wait();
  });
}

TEST(RequireSameOnAllRanks, TimeoutNamesTheMissingRank) {
  run_ranks(2,
            [](Rank& me) {
              if (me.rank == 1) return;
              EXPECT_ERROR(CommError, require_same_on_all_ranks(me.group(), "a test", {"one"}),
                           "rank 0 waited 0.2 s for rank 1", "in a test; it has not responded");
            },
            {.timeout = std::chrono::milliseconds(200)});
}

}  // namespace
}  // namespace tessera::comm
