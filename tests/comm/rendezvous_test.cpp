#include "tessera/comm/detail/rendezvous.h"

#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/detail/listen.h"
#include "tessera/comm/detail/store/authentication.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <future>
#include <random>

namespace tessera::comm::detail {
namespace {

using namespace std::chrono_literals;
using Store = c10::intrusive_ptr<c10d::Store>;

// Each call runs on its own thread, as each rank does, because each thread counts its own worlds.
std::future<Store> join(int64_t rank, int64_t size, const Environment& environment) {
  return std::async(std::launch::async, [=] {
    return open_store({"env://", rank, size, std::chrono::milliseconds(20s)}, environment).store;
  });
}

// A free port below those that the system gives to connections (32768 and more on Linux): a connection of another
// program cannot take it before the test does.
int64_t free_port_for_store() {
  std::random_device random;
  for (;;) try {
      int64_t port = 10'000 + random() % 20'000;
      host_store("127.0.0.1", port, store::make_job_secret(), 1s, port);
      return port;
    } catch (const CommError&) {  // in use
    }
}

// The store of `tessera run`.
struct HostedStore {
  HostedStore() {
    setenv("TESSERA_RUN", "1", 1);
    setenv("TESSERA_JOB_SECRET", secret.c_str(), 1);
  }
  ~HostedStore() {
    unsetenv("TESSERA_RUN");
    unsetenv("TESSERA_JOB_SECRET");
  }
  const std::string secret = store::make_job_secret();
  int64_t port = 0;
  Store store = host_store("127.0.0.1", 0, secret, 20s, port);
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

// Ranks of a shell loop, or of init({.rank, .world_size}), have no secret. Rank 0 makes one, for its own user only.
TEST(Rendezvous, OnOneMachineWithoutASecret) {
  Environment environment;
  environment.host = "127.0.0.1";
  environment.port = 20000 + getpid() % 10000;
  auto one = join(1, 2, environment), zero = join(0, 2, environment);
  one.get()->set("key", std::vector<uint8_t>{7});
  EXPECT_EQ(zero.get()->get("key"), (std::vector<uint8_t>{7}));
  environment.host = "head.invalid", environment.one_machine = true;  // the launcher says so: the host is not needed
  auto first = join(0, 2, environment), second = join(1, 2, environment);
  first.get(), second.get();
}

TEST(Rendezvous, WithASecret) {
  Environment environment;
  environment.host = "127.0.0.1", environment.port = free_port_for_store();
  setenv("TESSERA_JOB_SECRET", "0123456789abcdef", 1);
  auto zero = join(0, 3, environment), one = join(1, 3, environment);
  const auto server = zero.get();  // it runs as long as this client
  server->set("key", std::vector<uint8_t>{7});
  EXPECT_EQ(one.get()->get("key"), (std::vector<uint8_t>{7}));
  setenv("TESSERA_JOB_SECRET", "another secret 0123", 1);
  EXPECT_ERROR(UsageError, join(2, 3, environment).get(), "has another secret", "the same TESSERA_JOB_SECRET");
  unsetenv("TESSERA_JOB_SECRET");
}

// Ranks on several machines: the same store, with a secret that everybody knows.
TEST(Rendezvous, SeveralMachinesWithoutASecretWarnOnce) {
  Environment environment;
  environment.host = "0.0.0.0", environment.port = free_port_for_store();  // not a loopback address
  ::testing::internal::CaptureStderr();
  auto zero = join(0, 2, environment), one = join(1, 2, environment);
  const auto server = zero.get();  // it runs as long as this client
  server->set("key", std::vector<uint8_t>{7});
  EXPECT_EQ(one.get()->get("key"), (std::vector<uint8_t>{7}));
  const std::string warned = ::testing::internal::GetCapturedStderr();
  EXPECT_CONTAINS(warned, "no TESSERA_JOB_SECRET: every process that reaches 0.0.0.0:");
  EXPECT_EQ(warned.find("no TESSERA_JOB_SECRET"), warned.rfind("no TESSERA_JOB_SECRET")) << warned;
}

TEST(Rendezvous, ARankOfTesseraRunWithoutASecretIsRefused) {
  const HostedStore hosted;
  unsetenv("TESSERA_JOB_SECRET");
  EXPECT_ERROR(UsageError, join(1, 2, hosted.environment()).get(), "started by `tessera run`",
               "TESSERA_JOB_SECRET is not set");
}

// What the launcher reports ends the wait of the others, but only for ranks that have not joined.
TEST(Rendezvous, AnAbsentRankIsNamed) {
  const HostedStore hosted;
  const auto store = join(0, 2, hosted.environment()).get();
  const auto absent = [&] { return read_absent_ranks(*hosted.store, 0); };
  EXPECT_TRUE(absent().empty());
  report_absent_rank(*hosted.store, 0, 0, "rank 0 (pid 1) exited with code 0");  // it has joined
  report_absent_rank(*hosted.store, 0, 1, "rank 1 (pid 2) is stopped");
  report_absent_rank(*hosted.store, 1, 0, "in another restart");
  EXPECT_EQ(absent().size(), 2u);
  EXPECT_ERROR(CommError, exchange_hosts(*store, 0, 2, 20s, absent), "rank 0 waits for all 2 ranks to join",
               "rank 1 (pid 2) is stopped");
  EXPECT_EQ(tessera::detail::culprit_of("x: rank 1 (pid 2) is stopped"), 1);
  report_absent_rank(*hosted.store, 0, 1, "");  // continued
  EXPECT_EQ(absent().size(), 1u);
  EXPECT_ERROR(CommError, exchange_hosts(*store, 0, 2, 300ms, absent), "waited 0.3 s for rank 1 of 2");
}

TEST(Rendezvous, TimeoutNamesWhatIsMissing) {
  const std::string secret = store::make_job_secret();
  EXPECT_ERROR(CommError, join_store("127.0.0.1", free_port_for_store(), secret, 1ms),
               "no store answers at 127.0.0.1:", "refused");
  Environment environment;
  environment.job = "nobody-" + std::to_string(getpid());
  EXPECT_ERROR(CommError, open_store({"env://", 1, 2, 1ms}, environment), "for rank 0 of job 'nobody-");
  EXPECT_ERROR(CommError, open_store({"env://", 0, 2, 300ms}, environment), "0 of 1 connected");
  EXPECT_ERROR(UsageError, open_store({"tcp://127.0.0.1:99999", 0, 2, 1ms}, {}), "port 99999", "1 to 65535");
}

TEST(Rendezvous, PortInUseIsReported) {
  HostedStore hosted;
  EXPECT_ERROR(CommError, host_store("127.0.0.1", hosted.port, hosted.secret, 1s, hosted.port),
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
