#pragma once
#include "fault_case.h"

#include <gtest/gtest.h>

#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cerrno>
#include <set>
#include <sstream>

// Starts the processes of a fault case and checks what they print. Each process is this program again. It runs the test
// FaultRank.DISABLED_RunsOneRankOfACase of fault_matrix_test.cpp.
extern char** environ;

namespace tessera::testing {

class RunningFaultCase {
 public:
  explicit RunningFaultCase(FaultCase fault_case) : case_(std::move(fault_case)), folder_("/tmp/tessera-fault-XXXXXX") {
    if (!mkdtemp(folder_.data())) throw std::runtime_error("cannot make a folder in /tmp");
    started_ = now_s();
    for (int rank = 0; rank < case_.ranks; rank++) ranks_.push_back(start(rank));
  }
  ~RunningFaultCase() {
    for (Rank& rank : ranks_)
      if (rank.running) end(rank);
    unlink((folder_ + "/store").c_str());
    rmdir(folder_.c_str());
    for (const Rank& rank : ranks_) ::close(rank.output);
  }
  RunningFaultCase(const RunningFaultCase&) = delete;

  // True once all have ended.
  bool poll() {
    const double now = now_s();
    size_t running = 0, others = 0;
    for (size_t r = 0; r < ranks_.size(); r++) {
      Rank& rank = ranks_[r];
      if (rank.running && waitpid(rank.pid, &rank.status, WNOHANG) == rank.pid) rank.running = false, rank.ended = now;
      running += rank.running;
      others += rank.running && static_cast<int>(r) != case_.faulty_rank;
    }
    Rank& faulty_rank = ranks_[static_cast<size_t>(case_.faulty_rank)];
    const bool due = case_.fault == "kill any time" && now - started_ > case_.kill_after_ms / 1000.0;
    if (faulty_rank.running && (due || others == 0))
      kill(faulty_rank.pid, SIGKILL);  // a stopped process ends only by SIGKILL
    if (running && now - started_ > kPatience) {
      late_ = true;
      for (Rank& rank : ranks_)
        if (rank.running) end(rank);
      return true;
    }
    return running == 0;
  }

  // What went wrong, with the output of all ranks; "": nothing.
  std::string wrong() const {
    std::ostringstream out;
    if (late_) out << "  still running after " << kPatience << " s\n";
    const FaultRow* fault = fault_row(case_.fault);
    const auto& row = collective_row(case_.collective);
    const double at = time_in(text_of(case_.faulty_rank), "fault at ");
    for (int r = 0; r < case_.ranks; r++) {
      if (r == case_.faulty_rank) continue;
      const std::string text = text_of(r);
      std::vector<std::string> wanted{"error at", c10::str("ank ", case_.faulty_rank)};  // "Rank" or "rank"
      if (fault) wanted.insert(wanted.end(), fault->says.begin(), fault->says.end());
      const bool disagree = fault && !fault->says.empty() && fault->says[0] == "disagree";
      if (disagree && case_.ranks > 2)
        wanted.push_back(c10::str("rank ", case_.faulty_rank, " differs from most ranks"));
      if (fault && fault->names) {
        wanted.push_back("group 'world'");
        wanted.push_back(c10::str(comm::kind_name(row.kind, comm::Family::C10d), " #", case_.rounds, " ('", kTensor));
      }
      for (const auto& part : wanted)
        if (text.find(part) == std::string::npos) out << "  rank " << r << " does not print '" << part << "'\n";
      const Rank& rank = ranks_[static_cast<size_t>(r)];
      if (!late_ && (!WIFEXITED(rank.status) || WEXITSTATUS(rank.status) != 3))
        out << "  rank " << r << " ended with status " << rank.status << "\n";
      const double error_time = time_in(text, "error at ");
      if (fault && error_time - at > fault->within)
        out << "  rank " << r << " got its error after " << error_time - at << " s\n";
      const double left = time_in(text, "left at ");
      if (error_time > 0 && left - error_time > 1)
        out << "  rank " << r << " left " << left - error_time << " s later\n";
      if (left > 0 && rank.ended - left > 10) out << "  rank " << r << " ended " << rank.ended - left << " s later\n";
    }
    if (out.str().empty()) return "";
    std::ostringstream all;
    all << case_ << "\n" << out.str();
    for (int r = 0; r < case_.ranks; r++) all << "  -- rank " << r << ":\n" << text_of(r);
    return all.str();
  }

  std::string text_of(int rank) const {
    std::string text(1 << 16, 0);
    const ssize_t size = pread(ranks_[static_cast<size_t>(rank)].output, text.data(), text.size(), 0);
    text.resize(size > 0 ? static_cast<size_t>(size) : 0);
    return text;
  }
  std::vector<pid_t> pids() const {
    std::vector<pid_t> list;
    for (const Rank& rank : ranks_) list.push_back(rank.pid);
    return list;
  }

 private:
  static constexpr double kPatience = 40;
  struct Rank {
    pid_t pid = -1;
    int output = -1;  // memory
    int status = 0;
    bool running = true;
    double ended = 0;
  };

  // Each rank leads its own process group, so that its child processes can be found.
  Rank start(int rank) {
    Rank made;
    made.output = memfd_create("output", MFD_CLOEXEC);
    std::vector<std::string> words{"fault",
                                   "--gtest_filter=FaultRank.DISABLED_RunsOneRankOfACase",
                                   "--gtest_also_run_disabled_tests",
                                   "--gtest_catch_exceptions=0",  // the fault "exception" must leave main()
                                   case_.fault,
                                   case_.backend,
                                   case_.collective,
                                   std::to_string(case_.ranks),
                                   std::to_string(case_.faulty_rank),
                                   std::to_string(case_.rounds),
                                   std::to_string(rank),
                                   folder_ + "/store"};
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_adddup2(&files, made.output, STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&files, made.output, STDERR_FILENO);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    const int error = posix_spawn(&made.pid, "/proc/self/exe", &files, &attributes, argv.data(), environ);
    posix_spawn_file_actions_destroy(&files);
    posix_spawnattr_destroy(&attributes);
    if (error) throw std::runtime_error("cannot start a rank");
    return made;
  }
  static void end(Rank& rank) {
    kill(rank.pid, SIGKILL);
    waitpid(rank.pid, &rank.status, 0);
    rank.running = false;
  }
  static double time_in(const std::string& text, const std::string& before) {
    const size_t at = text.find(before);
    return at == std::string::npos ? 0 : std::atof(text.c_str() + at + before.size());
  }

  FaultCase case_;
  std::string folder_;
  double started_ = 0;
  std::vector<Rank> ranks_;
  bool late_ = false;
};

// Names in /dev/shm that Tessera may have created.
inline std::set<std::string> shared_memory_objects() {
  std::set<std::string> names;
  if (DIR* folder = opendir("/dev/shm")) {
    while (const dirent* entry = readdir(folder))
      if (std::string_view(entry->d_name).starts_with("tessera.")) names.insert(entry->d_name);
    closedir(folder);
  }
  return names;
}

// Runs all cases, `at_once` at a time. Returns a message for each case that went wrong and for anything left behind.
inline std::vector<std::string> run_fault_cases(const std::vector<FaultCase>& fault_cases, size_t at_once) {
  std::vector<std::string> wrong;
  const auto before = shared_memory_objects();
  std::vector<std::unique_ptr<RunningFaultCase>> running;
  std::vector<pid_t> pids;
  for (size_t next = 0; next < fault_cases.size() || !running.empty();) {
    while (next < fault_cases.size() && running.size() < at_once) {
      running.push_back(std::make_unique<RunningFaultCase>(fault_cases[next++]));
      for (const pid_t pid : running.back()->pids()) pids.push_back(pid);
    }
    std::erase_if(running, [&](const auto& fault_case) {
      if (!fault_case->poll()) return false;
      if (auto text = fault_case->wrong(); !text.empty()) wrong.push_back(std::move(text));
      return true;
    });
    usleep(3000);
  }
  for (const pid_t pid : pids)
    if (kill(-pid, 0) == 0 || errno != ESRCH) wrong.push_back(c10::str("a process of group ", pid, " still exists"));
  for (const auto& name : shared_memory_objects())
    if (!before.contains(name)) wrong.push_back(c10::str("/dev/shm/", name, " still exists"));
  return wrong;
}

}  // namespace tessera::testing
