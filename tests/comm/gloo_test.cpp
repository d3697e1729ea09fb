// The collectives over gloo, with processes as ranks. Also the test harness for processes.
#include "every_collective.h"
#include "tessera/base/detail/settings.h"
#include "tessera/comm/collectives.h"
#include "tessera/testing/detail/file_check.h"
#include "tessera/testing/spawn.h"

#include <ATen/ATen.h>

#include <csignal>

namespace tessera {
namespace {

using testing::FileCheck;
using testing::Rank;
using testing::spawn_ranks;

TEST(Gloo, EveryCollectiveOnTwo) { spawn_ranks(2, testing::every_collective); }
TEST(Gloo, EveryCollectiveOnFour) { spawn_ranks(4, testing::every_collective); }

TEST(Gloo, MeshAxesAndEqualSeeds) {
  spawn_ranks(4, [](Rank& me) {
    at::Tensor random = at::rand({4}), from_zero = random.clone();
    broadcast(from_zero, 0);
    EXPECT_TRUE(random.equal(from_zero)) << "every rank starts with seed 1234";
    auto mesh = me.mesh("dp=2,tp=2");
    at::Tensor x = at::full({1}, static_cast<double>(me.rank));
    all_reduce(x, ReduceOp::Sum, {mesh, "dp"});
    EXPECT_EQ(x.item<float>(), static_cast<float>(me.rank % 2 * 2 + 2));
  });
}

std::string report_of(int64_t n, const testing::Body& body, testing::SpawnOptions options = {}) {
  try {
    spawn_ranks(n, body, options);
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "no rank failed";
  return "";
}

TEST(Spawn, ReportsExceptions) {
  const auto report = report_of(2, [](Rank& me) {
    if (me.rank == 1) throw std::runtime_error("bad luck");
  });
  FileCheck().check("rank 1 exited with 10").check("rank 1 threw: bad luck").run(report);
}
TEST(Spawn, ReportsFailedExpectations) {
  const auto report = report_of(2, [](Rank& me) { EXPECT_EQ(me.rank, 1) << "on purpose"; });
  FileCheck().check("rank 0 exited with 10").check("on purpose").run(report);
}
TEST(Spawn, ReportsSignals) {
  FileCheck().check("rank 0 was killed by signal 9").run(report_of(1, [](Rank&) { raise(SIGKILL); }));
}
TEST(Spawn, ReportsAChildThatDoesNotReachTheCall) {
  if (setting_is_set("TESSERA_SPAWN")) return;
  FileCheck().check("rank 0 never reached this call").run(report_of(1, [](Rank&) {}));
}
TEST(Spawn, ATestMayCallItTwice) {
  spawn_ranks(1, [](Rank&) {});
  spawn_ranks(2, [](Rank& me) { EXPECT_EQ(me.size(), 2); });
}

TEST(Spawn, KillsARankThatHangs) {
  const auto report = report_of(1, [](Rank&) { pause(); }, {.timeout = std::chrono::seconds(2)});
  EXPECT_EQ(report.substr(0, report.find(':', report.find(':') + 1)),
            "some of 1 process ranks failed:\nrank 0 was still running after 2 s");
}

// The short time-out is that of the group. Processes may start slowly, so the world has the default one.
TEST(Gloo, TimeOutNamesGroupAndCollective) {
  FileCheck().check("allreduce_ #0 ('bias') of Float on group 'slow' (ranks 0,1)").run(report_of(2, [](Rank& me) {
    auto group = me.world.new_group({0, 1}, "slow");
    group->backend()->setTimeout(std::chrono::milliseconds(300));
    at::Tensor x = at::ones({2});
    if (me.rank == 0) group->all_reduce(x, ReduceOp::Sum, {.tensor_name = "bias"}).wait();
  }));
}

}  // namespace
}  // namespace tessera
