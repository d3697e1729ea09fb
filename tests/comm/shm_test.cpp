// The collectives over shared memory, with processes as ranks. Also the shared memory itself: its size, its errors, and
// that nothing remains in /dev/shm.
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

// The files in /dev/shm that belong to Tessera. Folders are those of other tests, which may run now.
std::vector<std::string> objects() {
  std::vector<std::string> found;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("tessera") && !entry.is_directory()) found.push_back(name);
  }
  return found;
}

TEST(Shm, SharedMemoryHasNoNameInDevShm) {
  run_ranks(3,
            [](Rank& me) {
              if (me.rank == 0) auto unconnected = me.world.new_group({0, 1});  // rank 1 does not create it
              EXPECT_EQ(objects(), std::vector<std::string>());
              auto pair = me.rank > 0 ? me.world.new_group({1, 2}) : comm::Group();
              me.group()->barrier().wait();
              EXPECT_EQ(objects(), std::vector<std::string>());
            },
            {.backend = "shm"});
}

std::string shm_report(const std::string& backend) {
  try {
    run_ranks(2, [](Rank& me) { me.group()->barrier().wait(); }, {.backend = backend});
  } catch (const std::exception& error) {
    return error.what();
  }
  return "fine";
}

TEST(Shm, FullDevShmIsAnErrorOnEveryRank) {
  setenv("TESSERA_STAGE_BYTES", "1000000000000", 1);  // more than any machine has
  const std::string report = shm_report("shm");
  unsetenv("TESSERA_STAGE_BYTES");
  EXPECT_CONTAINS(report, "2 of 2 ranks failed");
  EXPECT_CONTAINS(report, "group 'world' of 2 ranks: needs 7629");
  EXPECT_CONTAINS(report, "MiB of shared memory, but /dev/shm has");
  EXPECT_CONTAINS(report, "--shm-size=1g), or use backend gloo");
  EXPECT_EQ(objects(), std::vector<std::string>());
}

// Enters a new mount namespace as the same user. Mounts there are not visible outside.
bool enter_new_mount_namespace() {
  const std::string user = c10::str(getuid(), " ", getuid(), " 1"), group = c10::str(getgid(), " ", getgid(), " 1");
  if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  std::ofstream("/proc/self/setgroups") << "deny";
  std::ofstream("/proc/self/uid_map") << user;
  std::ofstream("/proc/self/gid_map") << group;
  return true;
}

// Runs `what` in a child process with its own mounts, and returns its text. Empty: this machine does not allow it.
std::string in_own_mounts(const std::function<bool()>& mounts, const std::function<std::string()>& what) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  const pid_t pid = fork();
  if (pid == 0) {
    ::close(ends[0]);
    const bool allowed = enter_new_mount_namespace() && mounts();
    const std::string text = allowed ? what() : "";
    _exit(write(ends[1], text.data(), text.size()) == static_cast<ssize_t>(text.size()) ? 0 : 1);
  }
  ::close(ends[1]);
  std::string text(1 << 16, '\0');
  size_t length = 0;
  for (ssize_t n; (n = read(ends[0], text.data() + length, text.size() - length)) > 0;)
    length += static_cast<size_t>(n);
  ::close(ends[0]);
  waitpid(pid, nullptr, 0);
  return text.substr(0, length);
}
bool mount_memory(const char* at, const char* options) { return mount("none", at, "tmpfs", 0, options) == 0; }

TEST(Shm, SmallDevShmIsReportedWithItsSize) {
  const auto report =
      in_own_mounts([] { return mount_memory("/dev/shm", "size=64k"); }, [] { return shm_report("shm"); });
  if (report.empty()) GTEST_SKIP() << "this machine does not allow mounts in a user namespace";
  EXPECT_CONTAINS(report, "needs 3 MiB of shared memory, but /dev/shm has 0 MiB left");
}

TEST(Shm, WithoutDevShmTheErrorNamesOtherBackends) {
  const auto no_shm = [] { return mount_memory("/dev", "size=64k"); };
  const auto report = in_own_mounts(no_shm, [] { return shm_report("shm"); });
  if (report.empty()) GTEST_SKIP() << "this machine does not allow mounts in a user namespace";
  EXPECT_CONTAINS(report,
                  "backend 'shm' needs ranks that can share memory, but rank 0 has no shared memory (/dev/shm: No "
                  "such file or directory); use 'auto' or 'gloo'");
  EXPECT_EQ(in_own_mounts(no_shm, [] { return shm_report("auto"); }), "fine");
}

// The memory is freed however the processes end.
TEST(Shm, KilledProcessesLeaveNothingInDevShm) {
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
