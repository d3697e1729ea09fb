#pragma once
#include "tessera/comm/detail/hosts.h"
#include "tessera/comm/detail/watch/last_collective_recorder.h"
#include "tessera/comm/detail/watch/process_status.h"

#include <c10/util/intrusive_ptr.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

// Detects lost ranks. Each process has a thread that writes a heartbeat ten times per second into the RankStatusTable
// and checks the heartbeats of the other ranks of its machine:
//
//   heartbeats arrive                           alive, however long its main thread is busy
//   no heartbeats, the process has ended        lost within half a second, unless it had called destroy()
//   no heartbeats, the process is stopped       lost after kStoppedBeforeLost
//   no heartbeats, the process runs             alive: the machine is overloaded
//   the rank has reported a failure             lost, with the reported message
//
// A lost rank aborts all groups that contain it. Ranks of other machines learn about it through the store.
namespace tessera::comm::watch {

class LivenessMonitor {
 public:
  // Every rank calls it.   Requires: `hosts` has the host of every rank; at least two ranks.
  // The monitor ends when the last reference is released. That may happen on its own thread, in an OnLost callback.
  static std::shared_ptr<LivenessMonitor> start(const c10::intrusive_ptr<c10d::Store>& store,
                                                const std::vector<Host>& hosts, int64_t rank,
                                                std::chrono::milliseconds timeout);

  // Adds a group. Calls `on_lost` with the reason, once, on the monitor's thread, when one of `ranks` is lost.
  // Returns the recorder for the group, or null if the RankStatusTable has no free row.
  // `key` identifies the group: it is the same on every member, and no other group has it.
  using OnLost = std::function<void(const std::string& why)>;
  std::shared_ptr<LastCollectiveRecorder> add(const std::string& name, const std::string& key,
                                              std::vector<int64_t> ranks, OnLost on_lost);

  std::string lost(const std::vector<int64_t>& ranks) const;  // which of them is lost, and why; "": none
  // The same after an error: first waits until the monitor has had time to detect a loss, about a second at most.
  std::string wait_for_cause(const std::vector<int64_t>& ranks);
  void report_failure(const std::string& message);                    // of this rank: the other ranks abort
  static void report_failure_of_process(const std::string& message);  // of every rank of this process
  void stop();                                                        // no group is aborted any more
  void leave();                                                       // stops, and records that this process may end

 private:
  LivenessMonitor(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<Host>& hosts, int64_t rank,
                  std::chrono::milliseconds timeout);
  struct Peer {  // another rank of this machine
    int64_t rank = 0;
    int local_rank = 0;
    pid_t pid = 0;
    uint64_t heartbeats = 0;
    int missed = 0;  // own heartbeats since the last heartbeat of the peer
    StoppedTime stopped = {};
  };
  struct MonitoredGroup {
    std::string name;
    uint64_t key;
    std::vector<int64_t> ranks;
    OnLost on_lost;
  };
  void run();
  void heartbeat();
  std::string check_peer(Peer& peer);  // why it is lost; "": it is not
  void mark_lost(int64_t rank, const std::string& why);
  void abort_groups();
  int64_t lost_rank_among(const std::vector<int64_t>& ranks) const;  // -1: none
  std::string lost_reason(int64_t lost_rank) const;                  // also notes the culprit
  std::string last_collective_text(const MonitoredGroup& group, int64_t rank) const;
  void read_losses_from_store();

  std::vector<int> local_ranks_;  // by rank; -1: on another machine
  int64_t rank_;
  int local_rank_ = 0;
  std::shared_ptr<RankStatusTable> table_;
  c10::intrusive_ptr<c10d::Store> store_;  // null: all ranks are on this machine
  std::vector<Peer> peers_;
  uint64_t heartbeats_sent_ = 0;

  mutable std::mutex mutex_;
  std::condition_variable wake_, rank_lost_;
  bool stopping_ = false;
  std::vector<std::string> lost_;  // by rank: why it is lost; "": it is not
  std::vector<MonitoredGroup> groups_;
  int rows_used_ = 0;
  std::thread thread_;
};

}  // namespace tessera::comm::watch
