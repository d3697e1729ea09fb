#include "tessera/comm/detail/rendezvous.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/listen.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <future>

namespace tessera::comm::detail {
namespace {

using namespace std::chrono_literals;
using Store = c10::intrusive_ptr<c10d::Store>;

// Each call runs on its own thread, as each rank does, because each thread counts its own worlds.
std::future<Store> join(int64_t rank, int64_t size, const Environment& environment) {
  return std::async(std::launch::async, [=] {
    return open_store({"env://", rank, size, std::chrono::milliseconds(20s)}, environment);
  });
}

struct HostedStore {
  int64_t port = 0;
  Store store = host_tcp_store("127.0.0.1", 0, 20s, port);
  Environment environment() const { return {"test", 0, 2, 0, 2, "127.0.0.1", port, "", true, 0}; }
};

TEST(Rendezvous, WorldsOfOneStoreDoNotShareKeys) {
  const HostedStore hosted;
  const auto first = join(0, 2, hosted.environment()).get();
  auto restarted = hosted.environment();
  restarted.restarts = 1;
  const auto second = join(0, 2, restarted).get();
  first->set("key", std::vector<uint8_t>{1});
  EXPECT_FALSE(second->check({"key"}));
  EXPECT_TRUE(join(1, 2, hosted.environment()).get()->check({"key"}));
}

TEST(Rendezvous, TwoProcessesWithOneRankAreRefused) {
  const HostedStore hosted;
  join(1, 2, hosted.environment()).get();
  EXPECT_ERROR(UsageError, join(1, 2, hosted.environment()).get(), "two processes are rank 1 of 2");
}

TEST(Rendezvous, DifferentWorldSizesAreRefused) {
  const HostedStore hosted;
  join(0, 3, hosted.environment()).get();
  EXPECT_ERROR(UsageError, join(1, 2, hosted.environment()).get(), "rank 1 was started in a world of 2 ranks",
               "earlier rank in a world of 3", "the same WORLD_SIZE");
}

TEST(Rendezvous, ByTheNameOfTheJob) {
  Environment environment;
  environment.job = "test-" + std::to_string(getpid());
  auto two = join(2, 3, environment), one = join(1, 3, environment), zero = join(0, 3, environment);
  one.get()->set("key", std::vector<uint8_t>{7});
  EXPECT_EQ(two.get()->get("key"), (std::vector<uint8_t>{7}));
  zero.get();
}

TEST(Rendezvous, TimeoutNamesWhatIsMissing) {
  int64_t port = 0;
  { const auto gone = host_tcp_store("127.0.0.1", 0, 1s, port); }
  EXPECT_ERROR(CommError, tcp_store("127.0.0.1", port, false, 0ms), "no process listens at 127.0.0.1:", "refused");
  Environment environment;
  environment.job = "nobody-" + std::to_string(getpid());
  EXPECT_ERROR(CommError, open_store({"env://", 1, 2, 1ms}, environment), "for rank 0 of job 'nobody-");
  EXPECT_ERROR(CommError, open_store({"env://", 0, 2, 500ms}, environment), "0 of 1 connected");
}

TEST(Rendezvous, PortInUseIsReported) {
  const HostedStore hosted;
  EXPECT_ERROR(CommError, tcp_store("127.0.0.1", hosted.port, true, 1s),
               "cannot listen on 127.0.0.1:", "Address already in use", "MASTER_PORT");
}

TEST(Rendezvous, RecognisesLoopback) {
  EXPECT_TRUE(is_loopback("127.0.0.1"));
  EXPECT_TRUE(is_loopback("::1"));
  EXPECT_FALSE(is_loopback("192.0.2.1"));
  EXPECT_ERROR(UsageError, is_loopback("no.such.host.invalid"), "'no.such.host.invalid' cannot be resolved");
}

}  // namespace
}  // namespace tessera::comm::detail
