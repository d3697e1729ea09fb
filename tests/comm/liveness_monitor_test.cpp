// Detection of lost ranks, and the status table in shared memory.
#include "tessera/comm/detail/watch/liveness_monitor.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/shared_region.h"
#include "tessera/comm/detail/rendezvous.h"
#include "tessera/comm/detail/watch/comparer.h"
#include "tessera/comm/detail/watch/process_status.h"
#include "tessera/comm/detail/watch/store_wait.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/spawn.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <future>
#include <set>
#include <sstream>

namespace tessera::comm {
namespace {

using testing::Rank;
using testing::spawn_ranks_over_each;

TEST(ProcessStatus, AliveStoppedAndEnded) {
  const auto me = watch::process_status(getpid());
  EXPECT_TRUE(me.alive);
  EXPECT_FALSE(me.stopped);
  EXPECT_GT(me.start_time, 0u);
  const pid_t child = fork();
  if (child == 0) {
    raise(SIGSTOP);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, WUNTRACED);
  EXPECT_TRUE(watch::process_status(child).stopped);
  EXPECT_GE(watch::process_status(child).start_time, me.start_time);
  kill(child, SIGKILL);
  siginfo_t ended{};
  waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT);
  EXPECT_FALSE(watch::process_status(child).alive) << "a zombie: it has ended, but was not reaped";
  waitpid(child, &status, 0);
  EXPECT_FALSE(watch::process_status(child).alive);
}

// Whether a process that is stopped at time 0, as an observer sees it at these instants, counts as lost at the last
// one.
bool is_lost_at_the_end(std::initializer_list<int> milliseconds_of_calls) {
  watch::StoppedTime stopped;
  const auto begin = watch::StoppedTime::Clock::now();
  bool lost = false;
  for (const int ms : milliseconds_of_calls) {
    EXPECT_FALSE(lost) << "before " << ms;
    lost = stopped.update(true, begin + std::chrono::milliseconds(ms));
  }
  return lost;
}

TEST(StoppedTime, CountsTimeAndNotCalls) {
  EXPECT_FALSE(is_lost_at_the_end({100, 500, 900, 1300, 1599}));
  EXPECT_TRUE(is_lost_at_the_end({100, 500, 900, 1300, 1600}));  // a loaded machine: four calls in 1.5 s
}

TEST(StoppedTime, AStopOfTheObserverIsNoTimeOfTheProcess) {
  EXPECT_FALSE(is_lost_at_the_end({0, 100, 3'600'000, 3'600'100}));  // ^Z of the entire job, for an hour
  watch::StoppedTime stopped;
  const auto begin = watch::StoppedTime::Clock::now();
  const auto at = [&](bool is_stopped, int ms) {
    return stopped.update(is_stopped, begin + std::chrono::milliseconds(ms));
  };
  for (int ms = 0; ms < 1500; ms += 100) EXPECT_FALSE(at(true, ms));
  EXPECT_FALSE(at(false, 1400));  // continued: it starts again
  for (int ms = 1500; ms < 3000; ms += 100) EXPECT_FALSE(at(true, ms));
  EXPECT_TRUE(at(true, 3000));
}

TEST(SharedMemory, HasNoName) {
  const auto made = region::SharedMemory::make(4096);
  struct stat found {};
  ASSERT_EQ(stat(made.path().c_str(), &found), 0);
  EXPECT_EQ(found.st_mode & 0777, 0600u);
  EXPECT_EQ(found.st_nlink, 0u);
  const auto again = region::SharedMemory::open(made.path(), 4096);
  made.data()[7] = 42;
  EXPECT_EQ(again.data()[7], 42);
  EXPECT_ERROR(CommError, region::SharedMemory::open(made.path(), 8192), "4096 bytes instead of 8192");
  EXPECT_ERROR(CommError, region::SharedMemory::open("/proc/1/fd/12345", 8192),
               "has the process that created it ended?");
}

TEST(RankStatusTable, OtherRanksReadWhatARankWrites) {
  watch::RankStatusTable mine(2, "");
  watch::RankStatusTable theirs(2, mine.path());
  mine.join(1, 99);
  EXPECT_EQ(theirs.state(0), watch::RankState::Absent);
  EXPECT_EQ(theirs.state(1), watch::RankState::Running);
  EXPECT_EQ(theirs.start_time(1), 99u);
  watch::LastCollective collective;
  collective.group = 17;
  collective.sequence = 4;
  collective.kind = CommKind::AllReduce;
  std::strcpy(collective.tensor_name, "wq.grad");
  mine.write(1, 3, collective);
  mine.set_waiting(1, 3, true);
  EXPECT_EQ(to_text(theirs.last(1, 17)), "allreduce_ #4 ('wq.grad')");
  EXPECT_TRUE(theirs.last(1, 17).waiting);
  EXPECT_EQ(theirs.last(1, 18).group, 0u);
  EXPECT_EQ(theirs.first_failed_rank(), -1);
  mine.record_first_failure(1, "first");
  theirs.record_first_failure(0, "second");
  EXPECT_EQ(theirs.first_failed_rank(), 1);
  EXPECT_EQ(theirs.first_failure(), "first");
  mine.fail(1, "why");
  EXPECT_EQ(theirs.state(1), watch::RankState::Failed);
  EXPECT_EQ(theirs.message(1), "why");
}

// c10d::FileStore reports a timeout as a plain error, not as a DistStoreError. That does not mean that it is gone.
TEST(WaitForKey, TimeoutOfTheStoreIsRetried) {
  struct : c10d::HashStore {
    using HashStore::wait;
    void wait(const std::vector<std::string>&, const std::chrono::milliseconds& timeout) override {
      if (calls++ == 6) return;
      std::this_thread::sleep_for(timeout);
      TORCH_CHECK(false, "Wait timeout");
    }
    int calls = 0;
  } store;
  store.set("k", std::vector<uint8_t>{'v'});
  EXPECT_EQ(watch::wait_for_key(store, "k", std::chrono::hours(1), [] { return std::string(); }), "v");
}

TEST(WaitForKey, EndsWhenARankIsLost) {
  c10d::HashStore store;
  const std::chrono::milliseconds hour(std::chrono::hours(1));
  EXPECT_ERROR(CommError, watch::wait_for_key(store, "k", hour, [] { return std::string("rank 3 has died"); }),
               "rank 3 has died");
  EXPECT_ERROR(CommError, watch::wait_for_key(store, "k", std::chrono::milliseconds(20), {}), "waited 0.02 s for 'k'");
  store.set("k", std::vector<uint8_t>{'v'});
  EXPECT_EQ(watch::wait_for_key(store, "k", hour, {}), "v");
}

TEST(SendRecvBytes, DifferenceNamesBothRanks) {
  watch::SendRecvBytes a(2), b(2);
  a.send = {8, 8};
  b.recv = {8, 8};
  EXPECT_EQ(watch::difference_of_sizes({a, b}, {3, 5}), "");
  b.recv[0] = 12;
  EXPECT_EQ(watch::difference_of_sizes({a, b}, {3, 5}),
            "ranks disagree: rank 5 expects 12 bytes from rank 3, which posted 8");
}

// Rank 0 is on one machine, ranks 1 and 2 are on another.
struct ThreeMonitors {
  std::shared_ptr<watch::LivenessMonitor> far, near, failing;

  ThreeMonitors() {
    const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
    std::vector<Host> hosts(3);
    for (size_t r = 0; r < hosts.size(); r++) {
      hosts[r].machine = r == 0 ? "a" : "b";
      hosts[r].pid = r == 1 ? getppid() : getpid();  // running processes; ranks 1 and 2 need different pids
    }
    const std::chrono::seconds timeout(10);
    far = watch::LivenessMonitor::start(store, hosts, 0, timeout);
    near = watch::LivenessMonitor::start(store, hosts, 1, timeout);
    failing = watch::LivenessMonitor::start(store, hosts, 2, timeout);
  }
};

// Rank 1 detects the loss of rank 2. Rank 0 reads it from the store.
TEST(LivenessMonitor, OtherMachinesLearnOfALostRank) {
  const ThreeMonitors monitors;
  auto &far = *monitors.far, &near = *monitors.near, &failing = *monitors.failing;
  std::promise<std::string> far_reason, near_reason;
  far.add("all", "all", {0, 1, 2}, [&](const std::string& why) { far_reason.set_value(why); });
  near.add("pair", "pair", {1, 2}, [&](const std::string& why) { near_reason.set_value(why); });
  near.add("others", "others", {0, 1}, [&](const std::string&) { ADD_FAILURE() << "no rank of this group is lost"; });
  failing.add("pair", "pair", {1, 2}, [](const std::string&) {})
      ->posted(CommKind::AllReduce, Family::C10d, 7, 16, c10::ScalarType::Float, "wq.grad");
  failing.report_failure("rank 2 failed: no luck today");
  EXPECT_EQ(near_reason.get_future().get(),
            "rank 2 failed: no luck today; its last collective on group 'pair' was allreduce_ #7 ('wq.grad')");
  EXPECT_EQ(far_reason.get_future().get(), "rank 2 failed: no luck today");
  EXPECT_EQ(far.lost({0, 1}), "");
  EXPECT_EQ(far.lost({0, 2}), "rank 2 failed: no luck today");
}

// The callback may release the last reference. Then the monitor ends on its own thread.
TEST(LivenessMonitor, MayEndOnItsOwnThread) {
  ThreeMonitors monitors;
  std::promise<void> ended;
  auto* near = monitors.near.get();
  auto last = std::make_shared<std::shared_ptr<watch::LivenessMonitor>>(std::move(monitors.near));
  near->add("pair", "pair", {1, 2}, [last, &ended](const std::string&) {
    last->reset();
    ended.set_value();
  });
  monitors.failing->report_failure("rank 2 failed");
  ended.get_future().get();
}

// A rank that is busy for long still sends heartbeats.
TEST(LivenessMonitor, BusyRankIsNotLost) {
  spawn_ranks_over_each(2, [](Rank& me) {
    if (me.rank == 1) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(700);
      while (std::chrono::steady_clock::now() < until) {
      }
    }
    at::Tensor x = at::ones({4});
    me.group()->all_reduce(x, ReduceOp::Sum).wait();
    EXPECT_EQ(x[0].item<float>(), 2);
  });
}

// "0100007F" is 127.0.0.1 as /proc prints it.
std::vector<std::string> listening_addresses() {
  std::set<std::string> sockets;
  for (int fd = 0; fd < 1024; fd++) {
    char target[64] = {};
    if (readlink(c10::str("/proc/self/fd/", fd).c_str(), target, sizeof target - 1) > 0) sockets.insert(target);
  }
  std::vector<std::string> found;
  for (const char* table : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
    std::ifstream lines(table);
    std::string line;
    std::getline(lines, line);
    while (std::getline(lines, line)) {
      std::istringstream words(line);
      std::string number, local, remote, state, skipped, inode;
      words >> number >> local >> remote >> state;
      for (int i = 0; i < 5; i++) words >> skipped;
      words >> inode;
      if (state == "0A" && sockets.contains("socket:[" + inode + "]"))
        found.push_back(local.substr(0, local.find(':')));
    }
  }
  return found;
}

TEST(Sockets, OneHostListensOnLoopbackOnly) {
  spawn_ranks_over_each(2, [](Rank& me) {
    auto pair = me.world.new_group({0, 1}, "pair");
    for (const auto& address : listening_addresses()) EXPECT_EQ(address, "0100007F") << me.world.backend();
    EXPECT_EQ(listening_addresses().empty(), me.world.backend() == "shm")
        << "otherwise the test finds no sockets at all";
  });
}

TEST(Sockets, StoreOfOneHostListensOnLoopbackOnly) {
  Environment launched;
  launched.launcher = "a test";
  launched.size = launched.local_size = 2;
  launched.one_machine = true;
  launched.host = "0.0.0.0";
  launched.port = 20000 + getpid() % 10000;
  const auto join = [&](int64_t rank) {
    return std::async(std::launch::async, [&launched, rank] {
      return detail::open_store({"env://", rank, 2, std::chrono::seconds(10)}, launched).store;
    });
  };
  auto one = join(1), zero = join(0);
  const auto store = zero.get();
  one.get();
  ASSERT_FALSE(listening_addresses().empty());
  for (const auto& address : listening_addresses()) EXPECT_EQ(address, "0100007F");
}

}  // namespace
}  // namespace tessera::comm
