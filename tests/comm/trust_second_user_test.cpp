// Another user of the host attacks the store, the rendezvous and the shared memory of a job. The attacks run in a child
// process with another user id, so the test needs root.
#include "store_test_server.h"
#include "tessera/base/error.h"
#include "tessera/comm/detail/local_rendezvous.h"
#include "tessera/comm/detail/region/shared_region.h"
#include "tessera/comm/detail/rendezvous.h"
#include "tessera/testing/expect_error.h"

#include <fcntl.h>
#include <grp.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <sstream>

namespace tessera::comm {
namespace {

using namespace std::chrono_literals;

constexpr uid_t kStranger = 65534;
constexpr int kAttacks = 50, kCannotChangeUser = 200;

// A child process of another user. Its exit code is the number of attacks that succeeded.
class Stranger {
 public:
  explicit Stranger(const std::function<int()>& attack) : pid_(fork()) {
    if (pid_ != 0) return;
    if (setgroups(0, nullptr) != 0 || setresgid(kStranger, kStranger, kStranger) != 0 ||
        setresuid(kStranger, kStranger, kStranger) != 0)
      _exit(kCannotChangeUser);
    int successes = 199;
    try {
      successes = attack();
    } catch (const std::exception& error) {
      std::cerr << "the attack itself failed: " << error.what() << std::endl;
    }
    _exit(successes);
  }
  ~Stranger() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  int successes() const {
    int status = 0;
    waitpid(pid_, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  const pid_t pid_;
};

class SecondUser : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can change its user id";
    if (Stranger([] { return 0; }).successes() == kCannotChangeUser)
      GTEST_SKIP() << "this process may not change its user id";
  }
};

bool throws(const std::function<void()>& what) {
  try {
    what();
    return false;
  } catch (const std::exception&) {
    return true;
  }
}

std::string read_all(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

// Each attack must leave the store as it is, and learn nothing.
int attack_store(const store::SocketAddress& address, const std::string& secret, pid_t owner, int number) {
  const auto guess = [&](const std::string& text) {
    return throws([&] {
      const auto client =
          c10::make_intrusive<store::AuthenticatedStore>(store::AuthenticatedStoreOptions{address, text, 5s, {}});
      client->set("shm", store::value_of("/proc/1/fd/3"));
    });
  };
  store::RawConnection raw(address);
  const auto hello = raw.receive(store::kServerHelloBytes);
  switch (number % 5) {
    case 0:
      return guess(store::make_job_secret()) ? 0 : 1;
    case 1:
      return guess(detail::kPublicSecret) ? 0 : 1;
    case 2:  // a proof that does not need the secret, and a request without waiting for the verdict
      raw.send(std::string(store::kMagic) + hello.substr(store::kMagic.size()) +
               std::string(store::kDigestBytes, '\0'));
      raw.send(store::encode_u32(1) + "x" + std::string(store::kDigestBytes, '\0'));
      return raw.receive(store::kVerdictBytes).substr(0, 1) == "A";
    case 3:  // a request without a handshake
      raw.send(store::encode_body(store::make_message(store::RequestCode::Set, {"shm", "/proc/1/fd/3"})));
      return raw.receive(1).empty() ? 0 : 1;
    default: {  // the secret itself
      const std::string process = c10::str("/proc/", owner);
      for (const char* file : {"/environ", "/cmdline"})
        if (read_all(process + file).find(secret) != std::string::npos) return 1;
      return 0;
    }
  }
}

TEST_F(SecondUser, AttacksTheStore) {
  setenv("TESSERA_JOB_SECRET", "in the environment of the victim", 1);
  const store::TestServer server;
  const auto store = server.client();
  store->set("shm", store::value_of("/proc/7/fd/9"));
  const pid_t owner = getpid();
  const Stranger stranger([&] {
    int successes = 0;
    for (int i = 0; i < kAttacks; i++) successes += attack_store(server.address, server.secret, owner, i);
    return successes;
  });
  EXPECT_EQ(stranger.successes(), 0);
  EXPECT_EQ(store->get("shm"), store::value_of("/proc/7/fd/9"));
  EXPECT_EQ(store->getNumKeys(), 1);
  unsetenv("TESSERA_JOB_SECRET");
}

struct AbstractName {
  sockaddr_un address{};
  socklen_t length;
  explicit AbstractName(const std::string& text) {
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, text.data(), text.size());
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&address); }
};

TEST_F(SecondUser, AsksRankZeroForTheSecret) {
  const std::string job = c10::str("second-user-", getpid());
  const AbstractName name(c10::str("tessera-", geteuid(), "-", job));
  auto rank_0 = std::async(std::launch::async, [&] { detail::send_store_ticket(job, {7, "the secret"}, 2, 20s); });
  const Stranger stranger([&] {
    int successes = 0;
    for (int i = 0; i < kAttacks;) {
      const store::Descriptor fd(socket(AF_UNIX, SOCK_STREAM, 0));
      if (connect(fd.get(), name.get(), name.length) != 0) continue;  // rank 0 does not listen yet
      char byte = 0;
      successes += recv(fd.get(), &byte, 1, 0) > 0;
      i++;
    }
    return successes;
  });
  EXPECT_EQ(stranger.successes(), 0);
  EXPECT_EQ(detail::receive_store_ticket(job, 20s).secret, "the secret");
  rank_0.get();
}

TEST_F(SecondUser, PretendsToBeRankZero) {
  const std::string job = c10::str("second-user-0-", getpid());
  const AbstractName name(c10::str("tessera-", geteuid(), "-", job));
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const Stranger stranger([&] {
    const store::Descriptor listener(socket(AF_UNIX, SOCK_STREAM, 0));
    if (bind(listener.get(), name.get(), name.length) != 0 || listen(listener.get(), 100) != 0) return 1;
    (void)!write(ready[1], "x", 1);
    const std::string ticket(16 + 10, '\1');
    for (;;) {
      const store::Descriptor client(accept(listener.get(), nullptr, nullptr));
      send(client.get(), ticket.data(), ticket.size(), MSG_NOSIGNAL);
    }
  });
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  for (const int end : ready) close(end);
  EXPECT_ERROR(CommError, detail::receive_store_ticket(job, 200ms), "user 65534 has the socket of that name");
  EXPECT_ERROR(CommError, detail::send_store_ticket(job, {7, "s"}, 2, 200ms), "another process has it", "MASTER_PORT");
}

// Memory that the stranger offers instead of the region of the job.
struct OfferedFile {
  const char* what;
  int flags;
  mode_t mode;
  bool named;
};
constexpr OfferedFile kOffered[] = {
    {"a named file that all can write", O_CREAT | O_EXCL, 0666, true},
    {"a named file of the stranger", O_CREAT | O_EXCL, 0600, true},
    {"a file without a name that all can write", O_TMPFILE, 0666, false},
    {"a file without a name of the stranger", O_TMPFILE, 0600, false},
    {"the same under a symbolic link", O_TMPFILE, 0600, true},
};
constexpr size_t kRegionBytes = 4096;

TEST_F(SecondUser, OffersMemoryOfItsOwn) {
  int paths[2], done[2];
  ASSERT_EQ(pipe(paths), 0);
  ASSERT_EQ(pipe(done), 0);
  const std::string prefix = c10::str("/dev/shm/second-user-", getpid(), "-");
  const Stranger stranger([&] {
    umask(0);
    for (int i = 0; i < kAttacks; i++) {
      const OfferedFile& offer = kOffered[static_cast<size_t>(i) % std::size(kOffered)];
      const bool is_tmpfile = (offer.flags & O_TMPFILE) == O_TMPFILE;
      std::string path = c10::str(prefix, i);
      const int fd = open(is_tmpfile ? "/dev/shm" : path.c_str(), offer.flags | O_RDWR, offer.mode);
      if (fd < 0 || ftruncate(fd, kRegionBytes) != 0) return 199;
      const std::string descriptor = c10::str("/proc/", getpid(), "/fd/", fd);
      if (is_tmpfile && offer.named && symlink(descriptor.c_str(), path.c_str()) != 0) return 199;
      if (!offer.named) path = descriptor;
      path.resize(100, '\0');
      (void)!write(paths[1], path.data(), path.size());
    }
    char byte = 0;
    (void)!read(done[0], &byte, 1);
    for (int i = 0; i < kAttacks; i++) unlink(c10::str(prefix, i).c_str());
    return 0;
  });
  for (int i = 0; i < kAttacks; i++) {
    char path[101] = {};
    ASSERT_EQ(read(paths[0], path, 100), 100);
    EXPECT_ERROR(CommError, region::SharedMemory::open(path, kRegionBytes), "belongs to user 65534, not to user 0",
                 "not created by a rank of this job");
  }
  (void)!write(done[1], "x", 1);
  EXPECT_EQ(stranger.successes(), 0);
  for (const int end : {paths[0], paths[1], done[0], done[1]}) close(end);
}

TEST_F(SecondUser, OpensTheMemoryOfTheJob) {
  const auto memory = region::SharedMemory::make(kRegionBytes);
  const std::string path = memory.path();
  const Stranger stranger([&] {
    int successes = 0;
    for (int i = 0; i < kAttacks; i++) successes += open(path.c_str(), i % 2 ? O_RDONLY : O_RDWR) >= 0;
    return successes;
  });
  EXPECT_EQ(stranger.successes(), 0);
}

// Memory of the right user that make() did not create. It needs no second user.
TEST(SharedMemoryChecks, RefuseFilesThatOthersCanReach) {
  const std::string path = c10::str("/dev/shm/tessera-checks-", getpid());
  const store::Descriptor named(open(path.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600));
  ASSERT_EQ(ftruncate(named.get(), kRegionBytes), 0);
  EXPECT_ERROR(CommError, region::SharedMemory::open(path, kRegionBytes), "has a name in a folder");
  unlink(path.c_str());
  const std::string unnamed = c10::str("/proc/", getpid(), "/fd/", named.get());
  EXPECT_EQ(region::SharedMemory::open(unnamed, kRegionBytes).size(), kRegionBytes);
  fchmod(named.get(), 0660);
  EXPECT_ERROR(CommError, region::SharedMemory::open(unnamed, kRegionBytes), "can be opened by other users");
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_ERROR(CommError, region::SharedMemory::open(c10::str("/proc/", getpid(), "/fd/", ends[0]), kRegionBytes),
               "is not a file in memory");
  for (const int end : ends) close(end);
}

// A rendezvous file that others can write, or own, is refused.
TEST_F(SecondUser, OwnsTheRendezvousFile) {
  const std::string path = c10::str("/tmp/tessera-second-user-", getpid());
  const auto open_file = [&] { detail::open_store({"file://" + path, 0, 2, 1s}, {}); };
  {
    const Stranger stranger([&] { return open(path.c_str(), O_CREAT | O_RDWR, 0666) < 0; });
    ASSERT_EQ(stranger.successes(), 0);
  }
  EXPECT_TRUE(throws(open_file));  // Linux may refuse to open it at all (fs.protected_regular)
  unlink(path.c_str());
  close(open(path.c_str(), O_CREAT | O_RDWR, 0600));
  chmod(path.c_str(), 0666);
  EXPECT_ERROR(UsageError, open_file(), "other users can write the file", "a folder of your own");
  unlink(path.c_str());
  open_file();
  unlink(path.c_str());
}

}  // namespace
}  // namespace tessera::comm
