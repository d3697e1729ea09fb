#include "tessera/comm/detail/store/store_server.h"

#include "store_test_server.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <future>
#include <iostream>

namespace tessera::comm::store {
namespace {

TEST(StoreServer, IPv4AndIPv6Loopback) {
  for (const std::string host : {"127.0.0.1", "::1", "localhost"}) {
    try {
      listen_on({host, 0});
    } catch (const c10::Error& error) {
      std::cout << "not tested: " << error.what_without_backtrace() << std::endl;
      continue;
    }
    const TestServer server(host);
    const auto store = server.client();
    store->set("key", value_of(host));
    EXPECT_EQ(store->clone()->get("key"), value_of(host));
  }
}

TEST(StoreServer, TheServerListensOnTheGivenAddressOnly) {
  const TestServer server("127.0.0.2");
  EXPECT_EQ(server.address.host, "127.0.0.2");
  EXPECT_NE(connect_once({"127.0.0.1", server.address.port}, deadline_after(1s)).error, 0);
  EXPECT_EQ(connect_once(server.address, deadline_after(1s)).error, 0);
  EXPECT_ERROR(CommError, StoreServer(server.address, server.secret), "cannot listen on 127.0.0.2",
               "choose another one");
}

TEST(StoreServer, TheServerTakesASocketAndLivesWithItsClient) {
  const std::string secret = make_job_secret();
  auto server = std::make_shared<StoreServer>(listen_on({"127.0.0.1", 0}), secret);
  const SocketAddress address = server->address();
  auto owner = c10::make_intrusive<AuthenticatedStore>(AuthenticatedStoreOptions{address, secret, 20s, server});
  server.reset();
  const c10::intrusive_ptr<c10d::Store> prefixed = c10::make_intrusive<c10d::PrefixStore>("world", owner);
  prefixed->set("key", value_of("1"));
  EXPECT_TRUE(owner->check({"world/key"}));
  EXPECT_TRUE(owner->hasExtendedApi());
  EXPECT_ERROR(UsageError, StoreServer(Descriptor(), secret), "not a listening socket");
}

TEST(StoreServer, ClientsWaitForAServerThatStartsLater) {
  const std::string secret = make_job_secret();
  SocketAddress address = listening_address(listen_on({"127.0.0.1", 0}).get());  // a port that is free now
  auto client = std::async(std::launch::async, [&] {
    return c10::make_intrusive<AuthenticatedStore>(AuthenticatedStoreOptions{address, secret, 20s});
  });
  EXPECT_EQ(client.wait_for(50ms), std::future_status::timeout);
  const StoreServer server(address, secret);
  client.get()->set("key", value_of("1"));
  address = listening_address(listen_on({"127.0.0.1", 0}).get());
  const std::string where = to_text(address);
  EXPECT_ERROR(CommError, AuthenticatedStore({address, secret, 60ms}), "no store answers at", where.c_str(),
               "is rank 0");
}

TEST(StoreServer, AChildAfterForkDoesNotStopTheServerOfItsParent) {
  TestServer server;
  const auto store = server.client();
  const pid_t child = fork();
  if (child == 0) {
    server.server.reset();
    _exit(0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(store->add("count", 1), 1);
}

TEST(StoreServer, ManyClientsComeAndLeaveWhileAnotherThreadWaits) {
  const TestServer server;
  const auto owner = server.client();
  for (int round = 0; round < 300; round++) {
    const auto visitor = server.client();
    auto wait = std::async(std::launch::async, [&] { EXPECT_THROW(visitor->wait({"never"}, 1ms), CommError); });
    EXPECT_EQ(visitor->add("rounds", 1), round + 1);
    wait.get();
  }
  EXPECT_EQ(owner->getNumKeys(), 1);
}

}  // namespace
}  // namespace tessera::comm::store
