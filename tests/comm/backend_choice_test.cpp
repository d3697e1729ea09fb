// The hosts of ranks, and which backend "auto" chooses for a group.
#include "tessera/comm/detail/backend_choice.h"

#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/spawn.h"

#include <gtest/gtest.h>

#include <sstream>

namespace tessera::comm {
namespace {

Host host(const std::string& machine, int64_t pid) {
  Host h;
  h.machine = machine + "/boot/26/1";
  h.pid = pid;
  h.cores = "0-3";
  return h;
}
std::string auto_for(const std::vector<int64_t>& ranks, const std::vector<Host>& hosts) {
  std::ostringstream text;
  text << choose_backend("auto", ranks, hosts);
  return text.str();
}

TEST(BackendChoice, DependsOnTheHostsOfTheRanks) {
  std::vector<Host> hosts{host("a", 1), host("a", 2), host("b", 1), host("b", 1)};
  EXPECT_EQ(auto_for({0, 1}, hosts), "shm (all 2 ranks are on a)");
  EXPECT_EQ(auto_for({2, 3}, hosts), "threads (all 2 ranks are threads of one process)");
  EXPECT_EQ(auto_for({1, 2}, hosts), "gloo (rank 1 is on a and rank 2 on b)");
  EXPECT_EQ(auto_for({0, 1, 2, 3}, hosts), "gloo (rank 0 is on a and rank 2 on b)");
  EXPECT_EQ(auto_for({3}, hosts), "threads (a group of one rank needs no transport)");
  hosts[1].machine = "a/boot/27/1";
  EXPECT_EQ(auto_for({0, 1}, hosts), "gloo (rank 0 is on a and rank 1 on it in another container or as another user)");
  hosts[1] = host("a", 2);
  hosts[1].shm = "/dev/shm: No such file or directory";
  EXPECT_EQ(auto_for({0, 1}, hosts), "gloo (rank 1 has no shared memory (/dev/shm: No such file or directory))");
}

TEST(BackendChoice, NcclIsUsedForDeviceTensorsOnly) {
  std::vector<Host> hosts{host("a", 1), host("a", 2)};
  hosts[0].devices = hosts[1].devices = 2;
  EXPECT_EQ(auto_for({0, 1}, hosts), "shm, devices over nccl (all 2 ranks are on a)");
  hosts[0].devices = hosts[1].devices = 1;  // both see the same device, which nccl does not support
  EXPECT_EQ(auto_for({0, 1}, hosts), "shm (all 2 ranks are on a)");
  hosts[1].visible = "1";  // each sees its own device
  EXPECT_EQ(auto_for({0, 1}, hosts), "shm, devices over nccl (all 2 ranks are on a)");
}

TEST(BackendChoice, RequestedBackendIsUsed) {
  const std::vector<Host> hosts{host("a", 1), host("b", 2)};
  EXPECT_EQ(choose_backend("gloo", {0, 1}, {}).backend, "gloo");
  EXPECT_CONTAINS(testing::error_message<UsageError>([&] {
                    choose_backend("shm", {0, 1}, hosts);
                  }),
                  "backend 'shm' needs ranks that can share memory, but rank 0 is on a and rank 1 on b; use 'auto' or");
}

TEST(Hosts, ParsePrintedText) {
  Host h = this_host();
  EXPECT_EQ(h.shm, "ok");
  EXPECT_FALSE(h.cores.empty());
  h.visible = "0,1";
  EXPECT_EQ(parse_host(to_text(h)), h);
  EXPECT_CONTAINS(testing::error_message<CommError>([] { parse_host("nonsense"); }), "nonsense");
}

TEST(Hosts, CoresAreCountedOncePerMachine) {
  std::vector<Host> hosts{host("a", 1), host("a", 2), host("b", 1)};
  EXPECT_TRUE(has_core_per_rank(hosts, 0));  // two ranks, four cores
  hosts[0].cores = hosts[1].cores = "3";
  EXPECT_FALSE(has_core_per_rank(hosts, 0));
  hosts[1].cores = "5";  // each rank is pinned to its own core
  EXPECT_TRUE(has_core_per_rank(hosts, 0));
  hosts[2].cores = "0";
  EXPECT_TRUE(has_core_per_rank(hosts, 2));
}

TEST(BackendChoice, AutoInARealWorld) {
  testing::spawn_ranks(2, [](testing::Rank& me) { EXPECT_EQ(me.world.backend(), "shm"); }, {.backend = "auto"});
  testing::run_ranks(2, [](testing::Rank& me) { EXPECT_EQ(me.world.backend(), "threads"); }, {.backend = "auto"});
}

}  // namespace
}  // namespace tessera::comm
