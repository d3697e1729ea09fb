#include "tessera/comm/world.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error.h"
#include "tessera/comm/backends.h"
#include "tessera/comm/collectives.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/ranks.h"

#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <thread>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;

template <class Call>
void expect_error(const char* part, Call&& call) {
  EXPECT_CONTAINS(testing::error_message<UsageError>(call), part);
}

// Two ranks, each a thread that calls init(options(rank)) itself.
void two_threads(const std::function<InitOptions(int64_t)>& options) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < 2; rank++)
    threads.emplace_back([&, rank] {
      InitOptions mine = options(rank);
      mine.rank = rank;
      mine.world_size = 2;
      mine.timeout = std::chrono::seconds(20);
      World world = init(mine);
      at::Tensor x = at::full({1}, static_cast<double>(rank + 1));
      all_reduce(x);
      EXPECT_EQ(x.item<float>(), 3.f);
      EXPECT_EQ(get_rank(), rank);
      EXPECT_EQ(get_world_size(), 2);
      barrier();
      destroy();
    });
  for (auto& thread : threads) thread.join();
}

TEST(World, WithoutALauncherItHasOneRank) {
  World world = init();
  EXPECT_EQ(world.rank(), 0);
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.backend(), "threads");
  expect_error("already has a world", [] { init(); });
  at::Tensor x = at::ones({2});
  all_reduce(x, ReduceOp::Avg);
  EXPECT_TRUE(x.equal(at::ones({2})));
  destroy();
  destroy();  // no world: does nothing
  EXPECT_FALSE(World::has_current());
  expect_error("this thread has no world", [] { World::current(); });
  init();  // and again
  destroy();
}

// Policies, observers and the tracer are thread-local, so backward must run on the same thread.
TEST(World, BackwardStaysOnTheRanksThread) {
  run_ranks(2, [](Rank&) { EXPECT_FALSE(c10::AutogradState::get_tls_state().get_multithreading_enabled()); });
}

TEST(World, FromAStore) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  two_threads([&](int64_t) { return InitOptions{.backend = "threads", .store = store}; });
}

TEST(World, FromAFile) {
  char path[] = "/tmp/tessera-world-XXXXXX";
  ::close(mkstemp(path));
  unlink(path);
  two_threads([&](int64_t) { return InitOptions{.backend = "threads", .init_method = c10::str("file://", path)}; });
  unlink(path);
}

TEST(World, OverTcp) {
  const int64_t port = 20000 + getpid() % 20000;
  two_threads(
      [&](int64_t) { return InitOptions{.backend = "threads", .init_method = c10::str("tcp://127.0.0.1:", port)}; });
}

TEST(World, FromTheEnvironment) {
  setenv("MASTER_PORT", std::to_string(20001 + (getpid() + 7) % 20000).c_str(), 1);
  setenv("TESSERA_BACKEND", "threads", 1);
  two_threads([&](int64_t) { return InitOptions{}; });
  setenv("RANK", "0", 1);
  setenv("WORLD_SIZE", "1", 1);
  EXPECT_EQ(init().size(), 1);
  destroy();
  setenv("WORLD_SIZE", "4", 1);
  expect_error("got world_size 2, but 4 ranks were started (RANK and WORLD_SIZE)", [] { init({.world_size = 2}); });
  EXPECT_EQ(init({.backend = "fake", .world_size = 2}).size(), 2);  // no other rank takes part
  destroy();
  setenv("WORLD_SIZE", "many", 1);
  expect_error("WORLD_SIZE is 'many', which is not a number", [] { init(); });
  for (const char* name : {"RANK", "WORLD_SIZE", "MASTER_PORT", "TESSERA_BACKEND"}) unsetenv(name);
}

TEST(World, BadOptionsAreRefused) {
  expect_error("rank 3 in a world of 2", [] { init({.rank = 3, .world_size = 2}); });
  expect_error("unknown backend 'pigeon'; known are threads, shm, gloo, fake, nccl",
               [] { init({.backend = "pigeon"}); });
  expect_error("is not supported; use env://", [] { init({.init_method = "http://x"}); });
  expect_error("tcp://host:port", [] { init({.init_method = "tcp://somewhere"}); });
  expect_error("file:///absolute/path", [] { init({.init_method = "file://here"}); });
  EXPECT_FALSE(World::has_current());
}

TEST(World, NewGroupConnectsItsMembers) {
  run_ranks(4, [](Rank& me) {
    if (me.rank != 3) {  // only the members call it
      auto group = me.world.new_group({2, 0, 1}, "odd order");
      EXPECT_EQ(group->rank(), me.rank == 2 ? 0 : me.rank + 1);
      EXPECT_EQ(get_rank(group), group->rank());
      EXPECT_EQ(get_world_size(group), 3);
      at::Tensor x = at::full({1}, static_cast<double>(me.rank));
      broadcast(x, 0, group);
      EXPECT_EQ(x.item<float>(), 2.f);
      auto again = me.world.new_group({2, 0, 1});
      EXPECT_NE(again->backend(), group->backend());
      EXPECT_EQ(again->name(), "group 2,0,1");
      auto a = group->all_reduce(x, ReduceOp::Sum);
      at::Tensor y = at::ones({1});
      again->all_reduce(y, ReduceOp::Sum).wait();
      a.wait();
      EXPECT_EQ(x.item<float>() + y.item<float>(), 9.f);
    } else {
      expect_error("rank 3 is not among the ranks 2,0,1", [&] { me.world.new_group({2, 0, 1}); });
      expect_error("contains a rank twice", [&] { me.world.new_group({3, 3}); });
      expect_error("rank 9 is not in a world of 4", [&] { me.world.new_group({3, 9}); });
      expect_error("at least one rank", [&] { me.world.new_group({}); });
    }
  });
}

TEST(World, ScopesNest) {
  World outer = init();
  {
    World::Scope none{World()};
    EXPECT_FALSE(World::has_current());
  }
  EXPECT_TRUE(World::has_current());
  outer.random().seed = 5;
  EXPECT_EQ(World::current().random().seed, 5u);
  destroy();
}

TEST(World, FakeWorldOfSixtyFourRanks) {
  World world = init({.backend = "fake", .rank = 17, .world_size = 64});
  at::Tensor x = at::ones({3}), all = at::zeros({192}), part = at::zeros({3});
  all_gather_into_tensor(all, x);
  EXPECT_TRUE(all.equal(at::ones({192})));
  reduce_scatter_tensor(part, at::arange(192).to(at::kFloat));
  EXPECT_TRUE(part.equal(at::arange(51, 54).to(at::kFloat)));
  all_reduce(x);
  at::Tensor mine = at::ones({2});
  scatter(mine, {}, 0);
  broadcast(mine, 3);
  barrier();
  auto group = world.new_group({16, 17, 18});
  EXPECT_EQ(group->rank(), 1);
  destroy();
}

// A backend of the user: a c10d::Backend with one collective.
struct Doubler : c10d::Backend {
  using Backend::Backend;
  struct Done : c10d::Work {
    bool wait(std::chrono::milliseconds) override { return true; }
  };
  const std::string getBackendName() const override { return "doubler"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& xs, const c10d::AllreduceOptions&) override {
    xs[0].mul_(2);
    return c10::make_intrusive<Done>();
  }
};

TEST(World, RegisteredBackendCarriesTheWorld) {
  comm::register_backend("doubler", [](const comm::ConnectOptions& o) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Doubler>(o.rank, o.size);
  });
  init({.backend = "doubler", .rank = 1, .world_size = 2, .store = c10::make_intrusive<c10d::HashStore>()});
  at::Tensor x = at::ones({2});
  all_reduce(x);
  EXPECT_TRUE(x.equal(at::full({2}, 2.0)));
  try {
    broadcast(x, 0);
    ADD_FAILURE();
  } catch (const CommError& error) {  // the message of the backend, with the name of the collective
    const std::string text = error.what();
    EXPECT_NE(text.find("rank 1, broadcast_ #1 on group 'world' (ranks 0,1)"), std::string::npos) << text;
    EXPECT_NE(text.find("does not support broadcast"), std::string::npos) << text;
  }
  destroy();
}

TEST(World, GroupAsAC10dProcessGroup) {
  run_ranks(2, [](Rank& me) {
    auto group = me.group()->process_group();
    std::vector<at::Tensor> xs{at::ones({3})};
    group->allreduce(xs)->wait();
    EXPECT_TRUE(xs[0].equal(at::full({3}, 2.0)));
    auto future = group->allreduce(xs)->getFuture();
    future->wait();
    EXPECT_TRUE(xs[0].equal(at::full({3}, 4.0)));
  });
}

TEST(Settings, EverySettingHasHelp) {
  for (const auto& row : all_settings()) EXPECT_FALSE(std::string(row.help).empty()) << row.name;
  EXPECT_EQ(setting("TESSERA_TIMEOUT_S"), "600");
  EXPECT_THROW(setting("TESSERA_NO_SUCH"), InternalError);
}

}  // namespace
}  // namespace tessera
