// The collectives over shared memory, in processes; and the shared memory itself: what it takes, and that nothing
// stays.
#include "every_collective.h"
#include "tessera/base/error.h"
#include "tessera/testing/expect_error.h"
#include "tessera/testing/spawn.h"

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>

namespace tessera {
namespace {

using testing::Rank;
using testing::run_ranks;
using testing::spawn_ranks;

TEST(Shm, EveryCollectiveOnTwo) { spawn_ranks(2, testing::every_collective, {.backend = "shm"}); }
TEST(Shm, EveryCollectiveOnFour) { spawn_ranks(4, testing::every_collective, {.backend = "shm"}); }

// What is in /dev/shm under a name of ours; but for the folders of spawn_ranks, of which other tests may have some.
std::vector<std::string> objects() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("tessera") && !name.starts_with("tessera-spawn-")) found.push_back(name);
  }
  return found;
}

TEST(Shm, TheMemoryNeverHasAName) {
  run_ranks(3,
            [](Rank& me) {
              if (me.rank == 0) auto never_met = me.world.new_group({0, 1});  // rank 1 does not make it
              EXPECT_EQ(objects(), std::vector<std::string>());
              auto pair = me.rank > 0 ? me.world.new_group({1, 2}) : comm::Group();
              me.group()->barrier().wait();
              EXPECT_EQ(objects(), std::vector<std::string>());
            },
            {.backend = "shm"});
}

std::string report_of(const std::string& backend) {
  try {
    run_ranks(2, [](Rank& me) { me.group()->barrier().wait(); }, {.backend = backend});
  } catch (const std::exception& error) {
    return error.what();
  }
  return "fine";
}

TEST(Shm, AFullDevShmIsAnErrorOnEveryRank) {
  setenv("TESSERA_STAGE_BYTES", "1000000000000", 1);  // more than any has
  const std::string report = report_of("shm");
  unsetenv("TESSERA_STAGE_BYTES");
  EXPECT_SAYS(report, "2 of 2 ranks failed");
  EXPECT_SAYS(report, "group 'world' of 2 ranks: needs 7629");
  EXPECT_SAYS(report, "MiB of shared memory, but /dev/shm has");
  EXPECT_SAYS(report, "--shm-size=1g), or use backend gloo");
  EXPECT_EQ(objects(), std::vector<std::string>());
}

// As the same user, in a namespace of its own: what is mounted there is seen by nobody else.
bool leave_our_mounts() {
  const std::string user = c10::str(getuid(), " ", getuid(), " 1"), group = c10::str(getgid(), " ", getgid(), " 1");
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << user;
  std::ofstream("/proc/self/gid_map") << group;
  return true;
}

// Runs `what` in a child with other mounts than ours, and gives what it says. Empty: such a child is not allowed here.
std::string in_other_mounts(const std::function<bool()>& mounts, const std::function<std::string()>& what) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    const bool allowed = leave_our_mounts() && mounts();
    const std::string text = allowed ? what() : "";
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  close(ends[1]);
  std::string text(1 << 16, '\0');
  size_t length = 0;
  for (ssize_t n; (n = read(ends[0], text.data() + length, text.size() - length)) > 0;)
    length += static_cast<size_t>(n);
  close(ends[0]);
  waitpid(pid, nullptr, 0);
  return text.substr(0, length);
}
bool mount_memory(const char* at, const char* options) { return mount("none", at, "tmpfs", 0, options) == 0; }

TEST(Shm, ASmallDevShm) {
  const auto report =
      in_other_mounts([] { return mount_memory("/dev/shm", "size=64k"); }, [] { return report_of("shm"); });
  if (report.empty()) GTEST_SKIP() << "a process may not mount anything here";
  EXPECT_SAYS(report, "needs 3 MiB of shared memory, but /dev/shm has 0 MiB left");
}

TEST(Shm, NoDevShm) {
  const auto no_shm = [] { return mount_memory("/dev", "size=64k"); };
  const auto report = in_other_mounts(no_shm, [] { return report_of("shm"); });
  if (report.empty()) GTEST_SKIP() << "a process may not mount anything here";
  EXPECT_SAYS(report,
              "backend 'shm' joins ranks that can share memory, but rank 0 has no shared memory (/dev/shm: No "
              "such file or directory); use 'auto' or 'gloo'");
  EXPECT_EQ(in_other_mounts(no_shm, [] { return report_of("auto"); }), "fine");
}

// However the processes end, the memory goes with them.
TEST(Shm, NothingStaysAfterAKill) {
  EXPECT_THROW(spawn_ranks(2,
                           [](Rank& me) {
                             me.group()->barrier().wait();
                             raise(SIGKILL);
                           },
                           {.backend = "shm"}),
               std::runtime_error);
  EXPECT_EQ(objects(), std::vector<std::string>());
}

}  // namespace
}  // namespace tessera
