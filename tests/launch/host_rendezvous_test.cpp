// The launchers of several hosts are threads of one process with one store.
#include "tessera/launch/detail/host_rendezvous.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <future>

namespace tessera::launch {
namespace {

using namespace std::chrono_literals;

class HostRendezvousTest : public ::testing::Test {
 protected:
  HostRendezvous::Options host(int64_t node_rank, int64_t nnodes, int64_t nproc_per_node) const {
    HostRendezvous::Options options;
    options.node_rank = node_rank, options.nnodes = nnodes, options.nproc_per_node = nproc_per_node;
    options.host = c10::str("host-", node_rank);
    options.run_id = c10::str("run-", node_rank);
    options.store_host = "head", options.store_port = 29400;
    options.timeout = 20s;
    return options;
  }
  std::future<HostAssignment> join(HostRendezvous& hosts, int64_t restarts = 0) {
    return std::async(std::launch::async, [this, &hosts, restarts] { return hosts.join(restarts, signals_).value(); });
  }
  Signals signals_;
  c10::intrusive_ptr<c10d::Store> store_ = c10::make_intrusive<c10d::HashStore>();
};

TEST_F(HostRendezvousTest, RanksAreNumberedByNodeRank) {
  HostRendezvous zero(store_, host(0, 3, 2)), one(store_, host(1, 3, 3)), two(store_, host(2, 3, 1));
  for (int64_t restarts = 0; restarts < 2; restarts++) {
    auto a = join(two, restarts), b = join(one, restarts), c = join(zero, restarts);
    EXPECT_EQ(c.get(), (HostAssignment{0, 3, 0, 2, 6, "head", 29400, "run-0"}));
    EXPECT_EQ(b.get(), (HostAssignment{1, 3, 2, 3, 6, "head", 29400, "run-0"}));
    EXPECT_EQ(a.get(), (HostAssignment{2, 3, 5, 1, 6, "head", 29400, "run-0"}));
  }
  // The destructors run in the order two, one, zero, so none waits.
}

TEST_F(HostRendezvousTest, AllHostsReportTheFirstFailure) {
  HostRendezvous zero(store_, host(0, 2, 1)), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  EXPECT_FALSE(zero.heartbeat().failure);
  EXPECT_EQ(one.report_failure({7, true, "a text of\ntwo lines"}).exit_code, 7);
  EXPECT_EQ(zero.report_failure({1, true, "late"}).text, "a text of\ntwo lines");
  const auto status = zero.heartbeat();
  ASSERT_TRUE(status.failure);
  EXPECT_EQ(status.failure->exit_code, 7);
  EXPECT_TRUE(status.failure->restartable);
  EXPECT_FALSE(status.all_succeeded);
  auto again = join(zero, 1), too = join(one, 1);
  again.get(), too.get();
  EXPECT_FALSE(zero.heartbeat().failure);  // the failure belongs to the start before
}

TEST_F(HostRendezvousTest, SuccessNeedsAllHosts) {
  HostRendezvous zero(store_, host(0, 2, 1)), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  zero.report_success();
  EXPECT_FALSE(zero.heartbeat().all_succeeded);
  one.report_success();
  EXPECT_TRUE(zero.heartbeat().all_succeeded);
  EXPECT_TRUE(one.heartbeat().all_succeeded);
}

TEST_F(HostRendezvousTest, ALauncherWithoutHeartbeatCountsAsDead) {
  auto options = host(0, 2, 1);
  options.heartbeat_timeout = 0ms;
  HostRendezvous zero(store_, options), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  one.heartbeat();
  EXPECT_FALSE(zero.heartbeat().failure);  // node 1 has sent one
  const auto failure = zero.heartbeat().failure;
  ASSERT_TRUE(failure);
  EXPECT_FALSE(failure->restartable);
  EXPECT_CONTAINS(failure->text, "the launcher of node 1 on host-1 has sent no heartbeat");
}

TEST_F(HostRendezvousTest, DifferentOptionsAreUsageErrors) {
  HostRendezvous zero(store_, host(0, 2, 1)), two(store_, host(0, 3, 1));
  auto waiting = join(zero);
  HostRendezvous other_nnodes(store_, host(1, 3, 1));
  EXPECT_ERROR(UsageError, other_nnodes.join(0, signals_), "this host has --nnodes 3, node 0 (host-0) has --nnodes 2");
  EXPECT_ERROR(UsageError, waiting.get(), "this host has --nnodes 2, node 1 (host-1) has --nnodes 3");
  EXPECT_ERROR(UsageError, two.join(0, signals_), "two launchers use --node-rank 0");
}

TEST_F(HostRendezvousTest, JoinFailsAfterTheJobHasEnded) {
  HostRendezvous zero(store_, host(0, 2, 1)), one(store_, host(1, 2, 1));
  auto a = join(zero), b = join(one);
  a.get(), b.get();
  one.report_failure({1, true, "a rank failed"});
  zero.report_failure({130, false, "stopped by hand"});
  EXPECT_ERROR(CommError, one.join(1, signals_), "the job has ended: stopped by hand");
}

TEST_F(HostRendezvousTest, AMissingHostIsNamed) {
  auto options = host(0, 2, 1);
  options.timeout = 0ms;
  HostRendezvous zero(store_, options);
  EXPECT_ERROR(CommError, zero.join(0, signals_), "node 1 of 2 has not joined at head:29400", "--node-rank 1");
}

TEST_F(HostRendezvousTest, ASignalInterruptsJoin) {
  HostRendezvous zero(store_, host(0, 2, 1));
  raise(SIGTERM);
  EXPECT_FALSE(zero.join(0, signals_));
  EXPECT_EQ(signals_.read(), std::vector<int>{SIGTERM});
}

}  // namespace
}  // namespace tessera::launch
