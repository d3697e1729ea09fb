// A training with asynchronous checkpoints is killed (kill -9) at random instants: one rank, all ranks, or the
// launcher. It resumes each time, and at the end each step has the loss of a run that was never killed: so no
// checkpoint was broken, and each sample was used exactly once. 6 kills; `make soak` makes 50.
// The learning rate is constant, so that the number of steps can be chosen after the last kill.
#include "tessera/base/detail/json.h"
#include "tessera/base/detail/settings.h"
#include "tessera/base/detail/text_file.h"
#include "tessera/checkpoint/detail/checkpoint_source.h"
#include "tessera/checkpoint/folders.h"

#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

namespace tessera::testing {
namespace {

namespace fs = std::filesystem;

pid_t start_training(const std::string& folder, int64_t steps, const std::vector<std::string>& more) {
  std::vector<std::string> words{TESSERA_PROGRAM,
                                 "train",
                                 "-n",
                                 "2",
                                 "--layers",
                                 "1",
                                 "--heads",
                                 "2",
                                 "--dim",
                                 "16",
                                 "--batch",
                                 "8",
                                 "--warmup",
                                 "1",
                                 "--schedule",
                                 "constant",
                                 "--eval-samples",
                                 "8",
                                 "--sample-tokens",
                                 "0",
                                 "--steps",
                                 std::to_string(steps),
                                 "--output",
                                 folder};
  words.insert(words.end(), more.begin(), more.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const auto log = folder + ".log";
  const pid_t pid = fork();
  if (pid == 0) {
    setenv("OMP_NUM_THREADS", "1", 1);
    const int out = open(log.c_str(), O_CREAT | O_WRONLY | O_TRUNC, 0600);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execv(argv[0], argv.data());
    _exit(127);
  }
  return pid;
}

// The ranks that a launcher has started. A child that has not called exec() yet is not one.
std::vector<pid_t> ranks_of(pid_t launcher) {
  std::ifstream file(c10::str("/proc/", launcher, "/task/", launcher, "/children"));
  std::vector<pid_t> ranks;
  for (const pid_t pid : std::vector<pid_t>(std::istream_iterator<pid_t>(file), {})) {
    std::ifstream environment(c10::str("/proc/", pid, "/environ"));
    const std::string text(std::istreambuf_iterator<char>(environment), {});
    if (text.find(std::string("\0LOCAL_RANK=", 12)) != std::string::npos) ranks.push_back(pid);
  }
  return ranks;
}

// Waits for a process that need not be a child of ours.
void wait_for_end(int pidfd) {
  pollfd ended{pidfd, POLLIN, 0};
  EXPECT_EQ(poll(&ended, 1, 60'000), 1) << "a process did not end within a minute";
  close(pidfd);
}

void wait_milliseconds(unsigned long count) { std::this_thread::sleep_for(std::chrono::milliseconds(count)); }

bool has_ended(pid_t pid) {  // and is a child that nobody has waited for
  siginfo_t about{};
  return waitid(P_PID, static_cast<id_t>(pid), &about, WEXITED | WNOHANG | WNOWAIT) == 0 && about.si_pid == pid;
}

int exit_code(pid_t pid) {
  int status = 0;
  while (waitpid(pid, &status, 0) < 0 && errno == EINTR) {
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// The loss and the number of samples of each step, as texts.
std::map<int64_t, std::string> steps_of(const std::string& folder) {
  std::map<int64_t, std::string> steps;
  std::istringstream lines(read_text_file(folder + "/metrics.jsonl", "the metrics"));
  for (std::string line; std::getline(lines, line);) {
    const auto json = Json::parse(line, folder);
    if (!json.find("grad_norm")) continue;
    const auto text = c10::str(json.at("loss").dump(), " after ", json.at("samples_read").number(), " samples");
    EXPECT_TRUE(steps.emplace(json.at("step").number(), text).second) << "a step is there twice: " << line;
  }
  return steps;
}

TEST(CheckpointRounds, AKilledTrainingLosesNothing) {
  const bool soak = setting("TESSERA_SOAK") == "1";
  const int kills = soak ? 50 : 6;
  constexpr int64_t kEndless = 1'000'000;
  std::string root = ::testing::TempDir() + "roundsXXXXXX";
  ASSERT_TRUE(mkdtemp(root.data()));
  const auto killed = root + "/killed", reference = root + "/reference";
  const std::vector<std::string> checkpoints{
      "--checkpoint-every", "1", "--checkpoint-async", "--checkpoint-keep", "2", "--resume", "auto"};
  std::mt19937 random(26);
  int while_training = 0, while_saving = 0;
  for (int i = 0; i < kills; i++) {
    const auto latest_before = dcp::latest(killed + "/checkpoints");
    const pid_t launcher = start_training(killed, kEndless, checkpoints);
    if (i % 4 == 3) {  // any instant, also before training starts
      wait_milliseconds(random() % 1500);
    } else {  // soon after a checkpoint of this run is complete: others are being written
      for (int waited = 0; waited < 60'000 && dcp::latest(killed + "/checkpoints") == latest_before; waited++) {
        ASSERT_FALSE(has_ended(launcher)) << read_text_file(killed + ".log", "the log");
        wait_milliseconds(1);
      }
      wait_milliseconds(random() % 200);
    }
    const auto ranks = ranks_of(launcher);
    std::vector<int> ends;
    for (const pid_t rank : ranks)
      if (const auto fd = static_cast<int>(syscall(SYS_pidfd_open, rank, 0)); fd >= 0) ends.push_back(fd);
    if (i % 3 == 0 || ranks.empty())
      kill(launcher, SIGKILL);
    else if (i % 3 == 1)
      kill(ranks[random() % ranks.size()], SIGKILL);
    else
      for (const pid_t rank : ranks) kill(rank, SIGKILL);
    exit_code(launcher);
    for (const int end : ends) wait_for_end(end);  // they hold the lock of the folder
    while_training += dcp::latest(killed + "/checkpoints").has_value();
    for (const auto& [step, path] : dcp::steps_in(killed + "/checkpoints")) {
      while_saving += fs::exists(dcp::partial_folder(dcp::step_folder(killed + "/checkpoints", step + 1)));
      EXPECT_NO_THROW(dcp::open_source(path)) << path;
    }
  }
  const auto latest = dcp::latest(killed + "/checkpoints");
  ASSERT_TRUE(latest);
  const int64_t steps = dcp::step_of(*latest).value() + 3;
  ASSERT_EQ(exit_code(start_training(killed, steps, checkpoints)), 0) << read_text_file(killed + ".log", "the log");
  ASSERT_EQ(exit_code(start_training(reference, steps, {})), 0) << read_text_file(reference + ".log", "the log");
  const auto expected = steps_of(reference), found = steps_of(killed);
  EXPECT_EQ(expected.size(), static_cast<size_t>(steps));
  EXPECT_EQ(found, expected);
  std::cout << kills << " kills, " << while_training << " after a first checkpoint, " << while_saving
            << " that left part of one; all " << steps << " losses are those of a run without kills\n";
  fs::remove_all(root);
}

}  // namespace
}  // namespace tessera::testing
