#include "tessera/checkpoint/detail/background_removal.h"

#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

namespace tessera::dcp {
namespace {

class FolderRemover {
 public:
  ~FolderRemover() {
    wait();
    remove_left();
  }

  void add(std::vector<std::string> folders) {
    const std::lock_guard lock(mutex_);
    join();
    process_ = getpid();
    thread_ = std::thread([folders = std::move(folders)] {
      lower_priority_of_this_thread();
      std::error_code ignored;
      for (const auto& folder : folders) std::filesystem::remove_all(folder, ignored);
    });
  }
  void wait() {
    const std::lock_guard lock(mutex_);
    join();
  }
  void leave(const std::string& folder) {
    const std::lock_guard lock(mutex_);
    std::erase_if(left_, [](const std::string& known) { return !std::filesystem::exists(known); });  // was taken
    left_.insert(folder);
    process_of_left_ = getpid();
  }
  void remove_left() {
    const std::lock_guard lock(mutex_);
    if (process_of_left_ != getpid()) return;
    std::error_code ignored;
    for (const auto& folder : std::exchange(left_, {})) std::filesystem::remove_all(folder, ignored);
  }

 private:
  void join() {
    if (!thread_.joinable()) return;
    if (process_ == getpid())
      thread_.join();
    else
      thread_.detach();  // the thread is one of the process that this one was forked from
  }

  std::mutex mutex_;
  std::thread thread_;
  std::set<std::string> left_;
  pid_t process_ = 0, process_of_left_ = 0;
};

FolderRemover& folder_remover() {
  static FolderRemover made;
  return made;
}

}  // namespace

void remove_in_background(std::vector<std::string> folders) {
  if (!folders.empty()) folder_remover().add(std::move(folders));
}

void wait_for_removals() { folder_remover().wait(); }
void leave_to_next_save(const std::string& folder) { folder_remover().leave(folder); }
void remove_left_folders() { folder_remover().remove_left(); }

void lower_priority_of_this_thread() {
  constexpr int kNice = 10;
  (void)setpriority(PRIO_PROCESS, 0, kNice);  // on Linux: of the thread. A higher one than now would be refused
}

}  // namespace tessera::dcp
