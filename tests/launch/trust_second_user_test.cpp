// Another user of the host attacks a running job of `tessera run`: its store, the environment of its processes, and
// what they leave in the file system. The attacks run with another user id, so the test needs root.
#include "tessera/comm/detail/rendezvous.h"
#include "tests/launch/shell.h"

#include <c10/util/StringUtil.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <grp.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <vector>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

constexpr uid_t kOtherUser = 65534;
constexpr int kJobAttacks = 50;

// A job of two ranks that wait. Each rank appends its pid and port to the file `up`.
class WaitingJob {
 public:
  WaitingJob() {
    std::string pattern = ::testing::TempDir() + "jobXXXXXX";
    folder_ = mkdtemp(pattern.data());
    setenv("TESSERA", TESSERA_PROGRAM, 1);
    pid_ = fork();
    if (pid_ == 0) {
      const std::string script = "echo $$ $MASTER_PORT >> " + folder_ + "/up; exec sleep 1000";
      setenv("TMPDIR", folder_.c_str(), 1);
      execl(TESSERA_PROGRAM, "tessera", "run", "-n", "2", "--", "sh", "-c", script.c_str(), nullptr);
      _exit(127);
    }
    while (ranks_.size() < 2) {
      ranks_.clear();
      std::ifstream up(folder_ + "/up");
      for (pid_t rank = 0; up >> rank >> port_;) ranks_.push_back(rank);
      usleep(1000);
    }
  }
  ~WaitingJob() {
    kill(pid_, SIGTERM);
    waitpid(pid_, nullptr, 0);
    fs::remove_all(folder_);
  }
  WaitingJob(const WaitingJob&) = delete;

  int port() const { return port_; }
  const std::string& folder() const { return folder_; }
  std::vector<pid_t> processes() const { return {pid_, ranks_[0], ranks_[1]}; }
  std::string secret() const {  // root may read it
    std::ifstream environment(c10::str("/proc/", ranks_[0], "/environ"), std::ios::binary);
    for (std::string entry; std::getline(environment, entry, '\0');)
      if (entry.starts_with("TESSERA_JOB_SECRET=")) return entry.substr(entry.find('=') + 1);
    return "";
  }

 private:
  pid_t pid_ = -1;
  std::string folder_;
  int port_ = 0;
  std::vector<pid_t> ranks_;
};

bool succeeds(const std::function<void()>& attack) {
  try {
    attack();
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

bool contains(const std::string& path, const std::string& text) {
  std::ostringstream all;
  all << std::ifstream(path, std::ios::binary).rdbuf();
  return all.str().find(text) != std::string::npos;
}

bool attack_job(const WaitingJob& job, const std::string& secret, int number) {
  using std::chrono::milliseconds;
  const auto guess = [&](const std::string& text) {
    return succeeds([&] { comm::detail::join_store("127.0.0.1", job.port(), text, milliseconds(1000)); });
  };
  if (number < 3)  // the client of c10d, which has no authentication
    return succeeds([&] {
      c10d::TCPStoreOptions options;
      options.port = static_cast<uint16_t>(job.port());
      options.waitWorkers = false;
      options.timeout = milliseconds(300);
      c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options)->set("key", std::vector<uint8_t>{1});
    });
  switch (number % 4) {
    case 0:
      return guess(comm::detail::kPublicSecret);
    case 1:
      return guess(std::string(64, '0'));
    case 2:
      for (const pid_t process : job.processes())
        for (const char* file : {"/environ", "/cmdline"})
          if (contains(c10::str("/proc/", process, file), secret)) return true;
      return false;
    default: {
      std::error_code error;
      for (const auto& entry : fs::recursive_directory_iterator(job.folder(), error))
        if (contains(entry.path(), secret) || std::ofstream(entry.path() / "planted")) return true;
      return false;
    }
  }
}

TEST(SecondUser, AttacksAJob) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can change its user id";
  const WaitingJob job;
  const std::string secret = job.secret();
  ASSERT_EQ(secret.size(), 64u);
  const pid_t stranger = fork();
  if (stranger == 0) {
    if (setgroups(0, nullptr) != 0 || setresgid(kOtherUser, kOtherUser, kOtherUser) != 0 ||
        setresuid(kOtherUser, kOtherUser, kOtherUser) != 0)
      _exit(200);
    int successes = 0;
    for (int i = 0; i < kJobAttacks; i++) successes += attack_job(job, secret, i);
    _exit(successes);
  }
  int status = 0;
  waitpid(stranger, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 200) GTEST_SKIP() << "this process may not change its user id";
  EXPECT_EQ(WEXITSTATUS(status), 0) << "attacks succeeded";
  // The job goes on, and who has the secret can use its store.
  const auto store = comm::detail::join_store("127.0.0.1", job.port(), secret, std::chrono::seconds(10));
  EXPECT_EQ(store->getNumKeys(), 0);
  // No command line has the secret.
  for (const pid_t process : job.processes()) EXPECT_FALSE(contains(c10::str("/proc/", process, "/cmdline"), secret));
}

TEST(JobSecret, IsNotPrinted) {
  const auto ran = shell("TESSERA_JOB_SECRET=0123456789abcdef \"$TESSERA\" env");
  EXPECT_EQ(ran.text.find("0123456789abcdef"), std::string::npos) << ran.text;
  EXPECT_NE(ran.text.find("TESSERA_JOB_SECRET           (set) "), std::string::npos) << ran.text;
}

}  // namespace
}  // namespace tessera::testing
