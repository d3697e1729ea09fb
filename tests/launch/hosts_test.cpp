// Launchers of several hosts as threads of one process, over one store.
#include "tessera/launch/detail/host_rendezvous.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <future>

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;

class HostsTest : public ::testing::Test {
 protected:
  Hosts::Options host(int64_t node, int64_t nodes, int64_t ranks) const {
    Hosts::Options options;
    options.node = node, options.nodes = nodes, options.ranks = ranks;
    options.host = c10::str("host-", node);
    options.run_id = c10::str("run-", node);
    options.store_host = "head", options.store_port = 29400;
    options.timeout = 20s;
    return options;
  }
  std::future<HostShare> join(Hosts& hosts, int64_t restarts = 0) {
    return std::async(std::launch::async, [this, &hosts, restarts] { return hosts.join(restarts, signals_).value(); });
  }
  Signals signals_;
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(HostsTest, RanksAreLaidOutByWhatEachAnnounced) {
  Hosts zero(store_, host(0, 3, 2)), one(store_, host(1, 3, 3)), two(store_, host(2, 3, 1));
  for (int64_t restarts = 0; restarts < 2; restarts++) {
    auto a = join(two, restarts), b = join(one, restarts), c = join(zero, restarts);
    EXPECT_EQ(c.get(), (HostShare{0, 3, 0, 2, 6, "head", 29400, "run-0"}));
    EXPECT_EQ(b.get(), (HostShare{1, 3, 2, 3, 6, "head", 29400, "run-0"}));
    EXPECT_EQ(a.get(), (HostShare{2, 3, 5, 1, 6, "head", 29400, "run-0"}));
  }
  // destroyed two, one, zero: nobody has to wait
}

TEST_F(HostsTest, TheFirstFailureIsEverybodys) {
  Hosts zero(store_, host(0, 2, 1)), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  EXPECT_FALSE(zero.news().failure);
  EXPECT_EQ(one.report({7, true, "a text of\ntwo lines"}).exit_code, 7);
  EXPECT_EQ(zero.report({1, true, "late"}).text, "a text of\ntwo lines");
  const auto news = zero.news();
  ASSERT_TRUE(news.failure);
  EXPECT_EQ(news.failure->exit_code, 7);
  EXPECT_TRUE(news.failure->restartable);
  EXPECT_FALSE(news.all_finished);
  auto again = join(zero, 1), too = join(one, 1);
  again.get(), too.get();
  EXPECT_FALSE(zero.news().failure);  // that was the start before
}

TEST_F(HostsTest, NobodyIsDoneBeforeAllAre) {
  Hosts zero(store_, host(0, 2, 1)), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  zero.finish();
  EXPECT_FALSE(zero.news().all_finished);
  one.finish();
  EXPECT_TRUE(zero.news().all_finished);
  EXPECT_TRUE(one.news().all_finished);
}

TEST_F(HostsTest, ASilentLauncherCountsAsDead) {
  auto options = host(0, 2, 1);
  options.silence = 0ms;
  Hosts zero(store_, options), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  one.news();
  EXPECT_FALSE(zero.news().failure);  // heard of
  const auto failure = zero.news().failure;
  ASSERT_TRUE(failure);
  EXPECT_FALSE(failure->restartable);
  EXPECT_SAYS(failure->text, "the launcher of node 1 on host-1 has not been heard of");
}

TEST_F(HostsTest, Disagreement) {
  Hosts zero(store_, host(0, 2, 1)), two(store_, host(0, 3, 1));
  auto waiting = join(zero);
  Hosts other_number(store_, host(1, 3, 1));
  EXPECT_ERROR(UsageError, other_number.join(0, signals_), "this host was told --nnodes 3, node 0 (host-0) --nnodes 2");
  EXPECT_ERROR(UsageError, waiting.get(), "this host was told --nnodes 2, node 1 (host-1) --nnodes 3");
  EXPECT_ERROR(UsageError, two.join(0, signals_), "two launchers say --node-rank 0");
}

TEST_F(HostsTest, WhoStopsForGoodIsNotWaitedFor) {
  Hosts zero(store_, host(0, 2, 1)), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  one.report({1, true, "a rank failed"});
  zero.report({130, false, "stopped by hand"});
  EXPECT_ERROR(CommError, one.join(1, signals_), "the job is over: stopped by hand");
}

TEST_F(HostsTest, OneThatDoesNotCome) {
  auto options = host(0, 2, 1);
  options.timeout = 0ms;
  Hosts zero(store_, options);
  EXPECT_ERROR(CommError, zero.join(0, signals_), "node 1 of 2 has not come to head:29400", "--node-rank 1");
}

TEST_F(HostsTest, ASignalEndsTheWait) {
  Hosts zero(store_, host(0, 2, 1));
  raise(SIGTERM);
  EXPECT_FALSE(zero.join(0, signals_));
  EXPECT_EQ(signals_.read(), std::vector<int>{SIGTERM});
}

}  // namespace
}  // namespace tessera::launch
