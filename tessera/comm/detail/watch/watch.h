#pragma once
#include "tessera/comm/detail/hosts.h"
#include "tessera/comm/detail/watch/journal.h"

#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

// Who is still there. Each process has a thread that beats ten times a second in the ledger and looks at the beats of
// the other ranks of its machine:
//
//   it beats                               fine, however long its main thread has been busy
//   it does not, and the process is gone   lost, within half a second, unless it had said that it leaves
//   ... and the process is stopped         lost after three seconds
//   ... and it runs                        fine: the machine has much to do
//   it says that it failed                 lost, with what it said
//
// A lost rank frees all that wait in a group with it. Ranks of other machines are told through the store.
namespace tessera::comm::watch {

class Watch {
 public:
  // Every rank calls it. Requires: hosts of all ranks; at least two ranks. It leaves when the last who has it lets go,
  // who may be its own thread: freeing a group can be what ends it.
  static std::shared_ptr<Watch> start(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<Host>& hosts,
                                      int64_t rank, std::chrono::milliseconds timeout);

  // Calls `free` with the reason, once, on the watch's thread, when one of `ranks` is lost. Gives the journal of the
  // group, or null if the ledger has no room for it. `key` is the same on every member, and of no other group.
  using Free = std::function<void(const std::string& why)>;
  std::shared_ptr<Journal> add(const std::string& name, const std::string& key, std::vector<int64_t> ranks, Free free);

  std::string lost(const std::vector<int64_t>& ranks) const;  // which of them and why; "": none
  // The same after something has failed: gives the watch the time it takes to notice why, about a second at most.
  std::string cause_among(const std::vector<int64_t>& ranks);
  void failed(const std::string& message);             // this rank: frees the others
  static void all_failed(const std::string& message);  // every rank of this process
  void stop();                                         // nobody is freed any more
  void leave();                                        // stops, and tells that this process may end

 private:
  Watch(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<Host>& hosts, int64_t rank,
        std::chrono::milliseconds timeout);
  struct Peer {  // of this machine
    int64_t rank = 0;
    int place = 0;
    pid_t pid = 0;
    uint64_t beats = 0;
    int silent = 0;   // own beats since its last one
    int stopped = 0;  // of these, those in which the process was stopped
  };
  struct Watched {
    std::string name;
    uint64_t key;
    std::vector<int64_t> ranks;
    Free free;
  };
  void run();
  void beat();
  std::string look(Peer& peer);  // "": fine
  void lose(int64_t rank, const std::string& why);
  void free_groups();
  int64_t culprit(const std::vector<int64_t>& ranks) const;  // -1: none
  std::string reason(int64_t culprit) const;
  std::string last_words(const Watched& group, int64_t rank) const;
  void hear_from_far();

  std::vector<int> places_;  // by rank; -1: on another machine
  int64_t rank_;
  int place_ = 0;
  std::shared_ptr<Ledger> ledger_;
  c10::intrusive_ptr<c10d::Store> far_;  // null: all ranks are on this machine
  std::vector<Peer> peers_;
  uint64_t turns_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wake_, lost_one_;
  bool stopping_ = false;
  std::vector<std::string> lost_;  // by rank: why; "": it is not
  std::vector<Watched> groups_;
  int rows_ = 0;
  std::thread thread_;
};

}  // namespace tessera::comm::watch
