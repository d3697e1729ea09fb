#pragma once
#include "fault_cell.h"

#include <dirent.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <cerrno>
#include <set>
#include <sstream>

// The processes of a cell, seen by the one who starts them.
extern char** environ;

namespace tessera::testing {

class RunningCell {
 public:
  explicit RunningCell(Cell cell) : cell_(std::move(cell)), folder_("/tmp/tessera-fault-XXXXXX") {
    if (!mkdtemp(folder_.data())) throw std::runtime_error("cannot make a folder in /tmp");
    started_ = now_s();
    for (int rank = 0; rank < cell_.ranks; rank++) ranks_.push_back(start(rank));
  }
  ~RunningCell() {
    for (Rank& rank : ranks_)
      if (rank.running) end(rank);
    unlink((folder_ + "/store").c_str());
    rmdir(folder_.c_str());
    for (const Rank& rank : ranks_) close(rank.output);
  }
  RunningCell(const RunningCell&) = delete;

  // True once all have ended.
  bool poll() {
    const double now = now_s();
    size_t running = 0, others = 0;
    for (size_t r = 0; r < ranks_.size(); r++) {
      Rank& rank = ranks_[r];
      if (rank.running && waitpid(rank.pid, &rank.status, WNOHANG) == rank.pid) rank.running = false, rank.ended = now;
      running += rank.running;
      others += rank.running && static_cast<int>(r) != cell_.culprit;
    }
    Rank& culprit = ranks_[static_cast<size_t>(cell_.culprit)];
    const bool due = cell_.fault == "kill any time" && now - started_ > cell_.kill_after_ms / 1000.0;
    if (culprit.running && (due || others == 0)) kill(culprit.pid, SIGKILL);  // one that is stopped ends no other way
    if (running && now - started_ > kPatience) {
      late_ = true;
      for (Rank& rank : ranks_)
        if (rank.running) end(rank);
      return true;
    }
    return running == 0;
  }

  // What was not as it should be, with all that was said; "": nothing.
  std::string wrong() const {
    std::ostringstream out;
    if (late_) out << "  still running after " << kPatience << " s\n";
    const FaultRow* fault = fault_row(cell_.fault);
    const auto& row = collective_row(cell_.collective);
    const double at = time_in(text_of(cell_.culprit), "fault at ");
    for (int r = 0; r < cell_.ranks; r++) {
      if (r == cell_.culprit) continue;
      const std::string text = text_of(r);
      std::vector<std::string> wanted{"freed at", c10::str("ank ", cell_.culprit)};  // "Rank" where a sentence begins
      if (fault) wanted.insert(wanted.end(), fault->says.begin(), fault->says.end());
      if (fault && fault->names) {
        wanted.push_back("group 'world'");
        wanted.push_back(c10::str(comm::kind_name(row.kind, comm::Family::C10d), " #", cell_.rounds, " ('", kTensor));
      }
      for (const auto& part : wanted)
        if (text.find(part) == std::string::npos) out << "  rank " << r << " does not say '" << part << "'\n";
      const Rank& rank = ranks_[static_cast<size_t>(r)];
      if (!late_ && (!WIFEXITED(rank.status) || WEXITSTATUS(rank.status) != 3))
        out << "  rank " << r << " ended with status " << rank.status << "\n";
      const double freed = time_in(text, "freed at ");
      if (fault && freed - at > fault->within) out << "  rank " << r << " was freed after " << freed - at << " s\n";
      const double left = time_in(text, "left at ");
      if (freed > 0 && left - freed > 1) out << "  rank " << r << " left " << left - freed << " s later\n";
      if (left > 0 && rank.ended - left > 10) out << "  rank " << r << " ended " << rank.ended - left << " s later\n";
    }
    if (out.str().empty()) return "";
    std::ostringstream all;
    all << cell_ << "\n" << out.str();
    for (int r = 0; r < cell_.ranks; r++) all << "  -- rank " << r << ":\n" << text_of(r);
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

  // Each is the head of a process group of its own, so that whatever it starts can be found.
  Rank start(int rank) {
    Rank made;
    made.output = memfd_create("output", MFD_CLOEXEC);
    std::vector<std::string> words{"fault",
                                   "--cell",
                                   cell_.fault,
                                   cell_.backend,
                                   cell_.collective,
                                   std::to_string(cell_.ranks),
                                   std::to_string(cell_.culprit),
                                   std::to_string(cell_.rounds),
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

  Cell cell_;
  std::string folder_;
  double started_ = 0;
  std::vector<Rank> ranks_;
  bool late_ = false;
};

// Names in /dev/shm that could be ours.
inline std::set<std::string> shared_memory_objects() {
  std::set<std::string> names;
  if (DIR* folder = opendir("/dev/shm")) {
    while (const dirent* entry = readdir(folder))
      if (std::string_view(entry->d_name).starts_with("tessera.")) names.insert(entry->d_name);
    closedir(folder);
  }
  return names;
}

// Runs all of them, so many at a time. Gives what went wrong in each that did, and what they left behind.
inline std::vector<std::string> run_cells(const std::vector<Cell>& cells, size_t at_once) {
  std::vector<std::string> wrong;
  const auto before = shared_memory_objects();
  std::vector<std::unique_ptr<RunningCell>> running;
  std::vector<pid_t> pids;
  for (size_t next = 0; next < cells.size() || !running.empty();) {
    while (next < cells.size() && running.size() < at_once) {
      running.push_back(std::make_unique<RunningCell>(cells[next++]));
      for (const pid_t pid : running.back()->pids()) pids.push_back(pid);
    }
    std::erase_if(running, [&](const auto& cell) {
      if (!cell->poll()) return false;
      if (auto text = cell->wrong(); !text.empty()) wrong.push_back(std::move(text));
      return true;
    });
    usleep(3000);
  }
  for (const pid_t pid : pids)
    if (kill(-pid, 0) == 0 || errno != ESRCH) wrong.push_back(c10::str("a process of group ", pid, " is left"));
  for (const auto& name : shared_memory_objects())
    if (!before.contains(name)) wrong.push_back(c10::str("/dev/shm/", name, " is left"));
  return wrong;
}

}  // namespace tessera::testing
