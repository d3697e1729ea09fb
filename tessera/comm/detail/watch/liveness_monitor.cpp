#include "tessera/comm/detail/watch/liveness_monitor.h"

#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/detail/watch/store_wait.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>

namespace tessera::comm::watch {
namespace {

constexpr std::chrono::milliseconds kHeartbeatInterval(100);
// Counted in own heartbeats, not in seconds: if the entire job is stopped (^Z) and continued, no heartbeat is missed.
constexpr int kMissedBeforeCheck = 2;                     // then the monitor checks the process
constexpr std::chrono::milliseconds kDetectionTime(900);  // upper bound for the detection of a process that has ended
constexpr uint64_t kStorePollInterval = 4;                // in heartbeats

constexpr const char* kLostKey = "watch/lost";

std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

uint64_t hash_of(const std::string& key) { return std::max<uint64_t>(1, std::hash<std::string>()(key)); }

// Opens the table that the first rank of this machine creates. Until then only the process of that rank can be checked.
std::shared_ptr<RankStatusTable> open_status_table(c10d::Store& store, const std::string& key, int ranks,
                                                   int64_t leader, pid_t pid, std::chrono::milliseconds timeout) {
  StoppedTime stopped;
  const auto find_lost = [&]() -> std::string {
    const ProcessStatus process = process_status(pid);
    const std::string name = c10::str("rank ", leader, " (pid ", pid, ") ");
    if (!process.alive) return name + "has died before it created the rank status table";
    const bool lost = stopped.update(process.stopped, StoppedTime::Clock::now());
    return lost ? name + "is stopped by a signal (SIGSTOP or ^Z)" : "";
  };
  const auto lost = [&] {
    const std::string why = find_lost();
    if (!why.empty()) tessera::detail::note_culprit(leader, why);
    return why;
  };
  try {
    return std::make_shared<RankStatusTable>(ranks, wait_for_key(store, key, timeout, lost));
  } catch (const c10::Error& error) {
    const std::string why = lost();
    TESSERA_FAIL(CommError, "cannot open the rank status table of this machine: ",
                 why.empty() ? c10::str("rank ", leader, " creates it; ", error.what_without_backtrace()) : why);
  }
}

// The monitors of this process, for report_failure_of_process.
std::mutex all_mutex;
std::vector<LivenessMonitor*> all;

}  // namespace

LivenessMonitor::LivenessMonitor(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<Host>& hosts,
                                 int64_t rank, std::chrono::milliseconds timeout)
    : local_ranks_(hosts.size(), -1), rank_(rank), lost_(hosts.size()) {
  const Host& here = hosts[static_cast<size_t>(rank)];
  int64_t leader = -1;
  int local_size = 0;
  for (size_t r = 0; r < hosts.size(); r++) {
    if (hosts[r].machine != here.machine) continue;
    if (leader < 0) leader = static_cast<int64_t>(r);
    local_ranks_[r] = local_size++;
    // Ranks that are threads of this process end with it.
    if (hosts[r].pid != here.pid)
      peers_.push_back({static_cast<int64_t>(r), local_ranks_[r], static_cast<pid_t>(hosts[r].pid)});
  }
  local_rank_ = local_ranks_[static_cast<size_t>(rank)];
  const std::string key = c10::str("watch/status_table/", leader);
  if (leader == rank) {
    table_ = std::make_shared<RankStatusTable>(local_size, "");
    store->set(key, to_bytes(table_->path()));
  } else {
    const auto leader_pid = static_cast<pid_t>(hosts[static_cast<size_t>(leader)].pid);
    table_ = open_status_table(*store, key, local_size, leader, leader_pid, timeout);
  }
  table_->join(local_rank_, process_status(getpid()).start_time);
  if (local_size < static_cast<int>(hosts.size())) store_ = store->clone();
}

// The thread holds a reference too, so the monitor lives until its users and its thread are done.
std::shared_ptr<LivenessMonitor> LivenessMonitor::start(const c10::intrusive_ptr<c10d::Store>& store,
                                                        const std::vector<Host>& hosts, int64_t rank,
                                                        std::chrono::milliseconds timeout) {
  const std::shared_ptr<LivenessMonitor> monitor(new LivenessMonitor(store, hosts, rank, timeout));
  monitor->thread_ = std::thread([monitor] { monitor->run(); });
  {
    std::lock_guard lock(all_mutex);
    all.push_back(monitor.get());
  }
  return {monitor.get(), [monitor](LivenessMonitor*) {
            {
              std::lock_guard lock(all_mutex);
              std::erase(all, monitor.get());
            }
            monitor->leave();
          }};
}

void LivenessMonitor::report_failure_of_process(const std::string& message) {
  std::lock_guard lock(all_mutex);
  for (LivenessMonitor* monitor : all) monitor->report_failure(c10::str("rank ", monitor->rank_, " failed: ", message));
}

void LivenessMonitor::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    groups_.clear();
  }
  wake_.notify_one();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();  // called by an OnLost callback: the thread ends after its current callbacks
  else
    thread_.join();
}

void LivenessMonitor::leave() {
  stop();
  if (table_->state(local_rank_) == RankState::Running) table_->set_state(local_rank_, RankState::Left);
}

void LivenessMonitor::report_failure(const std::string& message) {
  const int64_t culprit = tessera::detail::culprit_of(message);
  table_->record_first_failure(culprit >= 0 ? culprit : rank_, message);
  table_->fail(local_rank_, message);
}

std::shared_ptr<LastCollectiveRecorder> LivenessMonitor::add(const std::string& name, const std::string& key,
                                                             std::vector<int64_t> ranks, OnLost on_lost) {
  std::lock_guard lock(mutex_);
  groups_.push_back({name, hash_of(key), std::move(ranks), std::move(on_lost)});
  if (rows_used_ == RankStatusTable::kGroups) return nullptr;
  return std::make_shared<LastCollectiveRecorder>(table_, local_rank_, rows_used_++, groups_.back().key);
}

std::string LivenessMonitor::lost(const std::vector<int64_t>& ranks) const {
  std::lock_guard lock(mutex_);
  const int64_t rank = lost_rank_among(ranks);
  return rank < 0 ? "" : lost_reason(rank);
}

std::string LivenessMonitor::wait_for_cause(const std::vector<int64_t>& ranks) {
  std::unique_lock lock(mutex_);
  rank_lost_.wait_for(lock, kDetectionTime, [&] { return stopping_ || lost_rank_among(ranks) >= 0; });
  lock.unlock();
  return lost(ranks);
}

void LivenessMonitor::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kHeartbeatInterval, [&] { return stopping_; })) {
    lock.unlock();
    heartbeat();
    lock.lock();
  }
}

void LivenessMonitor::heartbeat() {
  table_->heartbeat(local_rank_);
  for (Peer& peer : peers_)
    if (const std::string why = check_peer(peer); !why.empty()) mark_lost(peer.rank, why);
  if (store_ && heartbeats_sent_++ % kStorePollInterval == 0) read_losses_from_store();
  abort_groups();
}

std::string LivenessMonitor::check_peer(Peer& peer) {
  const RankState state = table_->state(peer.local_rank);
  if (state == RankState::Failed) return table_->message(peer.local_rank);
  if (state == RankState::Left) return "";
  const uint64_t heartbeats = table_->heartbeats(peer.local_rank);
  if (heartbeats != std::exchange(peer.heartbeats, heartbeats)) {
    peer.missed = 0;
    peer.stopped = {};
    return "";
  }
  if (++peer.missed < kMissedBeforeCheck) return "";
  const ProcessStatus process = process_status(peer.pid);
  const bool pid_reused = state == RankState::Running && process.start_time != table_->start_time(peer.local_rank);
  if (!process.alive || pid_reused) {
    const RankState last = table_->state(peer.local_rank);  // it may have left just before it ended
    if (last == RankState::Failed) return table_->message(peer.local_rank);
    if (last == RankState::Left) return "";
    return c10::str("rank ", peer.rank, " (pid ", peer.pid, ") has died: killed, crashed, or ended without destroy()");
  }
  if (!peer.stopped.update(process.stopped, StoppedTime::Clock::now())) return "";
  return c10::str("rank ", peer.rank, " (pid ", peer.pid, ") is stopped by a signal (SIGSTOP or ^Z)");
}

void LivenessMonitor::mark_lost(int64_t rank, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    std::string& known = lost_[static_cast<size_t>(rank)];
    if (!known.empty()) return;
    known = why;
  }
  rank_lost_.notify_all();
  table_->record_first_failure(rank, why);
  if (store_) try {
      store_->compareSet(kLostKey, {}, to_bytes(c10::str(rank, " ", why)));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the other machines have lost the store as well
    }
}

void LivenessMonitor::read_losses_from_store() {
  try {
    if (!store_->check({kLostKey})) return;
    const auto value = store_->get(kLostKey);
    const std::string text(value.begin(), value.end());
    const auto rank = static_cast<size_t>(std::stoll(text));
    std::lock_guard lock(mutex_);
    if (lost_.at(rank).empty()) lost_[rank] = text.substr(text.find(' ') + 1);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the next collective fails with the error
  }
}

// The first rank that failed on this machine if it is one of `ranks`; else any of them that is lost.
int64_t LivenessMonitor::lost_rank_among(const std::vector<int64_t>& ranks) const {
  const int64_t first = table_->first_failed_rank();
  int64_t found = -1;
  for (const int64_t r : ranks)
    if (!lost_[static_cast<size_t>(r)].empty() && (found < 0 || r == first)) found = r;
  return found;
}

std::string LivenessMonitor::lost_reason(int64_t lost_rank) const {
  std::string why = lost_[static_cast<size_t>(lost_rank)];
  const int64_t first = table_->first_failed_rank();
  if (first >= 0 && lost_rank != first && why.find(c10::str("rank ", first, " ")) == std::string::npos)
    why += "; before that, " + table_->first_failure();
  tessera::detail::note_culprit(first >= 0 ? first : lost_rank, why);
  return why;
}

std::string LivenessMonitor::last_collective_text(const MonitoredGroup& group, int64_t rank) const {
  const int local_rank = local_ranks_[static_cast<size_t>(rank)];
  if (local_rank < 0) return "";
  const LastCollective last = table_->last(local_rank, group.key);
  if (last.group == 0) return c10::str("; it has posted nothing on group '", group.name, "'");
  return c10::str("; its last collective on group '", group.name, "' was ", to_text(last),
                  last.waiting ? ", which it was waiting for" : "");
}

void LivenessMonitor::abort_groups() {
  std::vector<std::pair<OnLost, std::string>> calls;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [&](const MonitoredGroup& group) {
      const int64_t rank = lost_rank_among(group.ranks);
      if (rank < 0) return false;
      calls.emplace_back(group.on_lost, lost_reason(rank) + last_collective_text(group, rank));
      return true;
    });
  }
  for (const auto& [on_lost, why] : calls) on_lost(why);  // without the lock: callbacks of futures may call the monitor
}

}  // namespace tessera::comm::watch
