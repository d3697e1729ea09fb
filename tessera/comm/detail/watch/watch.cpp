#include "tessera/comm/detail/watch/watch.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/watch/process.h"
#include "tessera/comm/detail/watch/store_wait.h"

#include <unistd.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>

namespace tessera::comm::watch {
namespace {

constexpr std::chrono::milliseconds kBeat(100);
// In own beats, not in seconds: after the whole job was stopped (^Z) and goes on, nobody has missed anything.
constexpr int kSilent = 2;                          // then the process is looked at
constexpr int kStopped = 30;                        // then it counts as lost
constexpr std::chrono::milliseconds kNotices(900);  // a death, from any moment on
constexpr uint64_t kFarEvery = 4;

constexpr const char* kLostKey = "watch/lost";

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }

uint64_t hash_of(const std::string& key) { return std::max<uint64_t>(1, std::hash<std::string>()(key)); }

// What the first rank of this machine has made. As long as there is no ledger, its process is all that can be watched.
std::shared_ptr<Ledger> open_ledger(c10d::Store& store, const std::string& key, int ranks, int64_t leader, pid_t pid,
                                    std::chrono::milliseconds timeout) {
  const auto lost = [=]() -> std::string {
    if (look_at_process(pid).alive) return "";
    return c10::str("rank ", leader, " (pid ", pid, ") has died before it had made the ledger");
  };
  try {
    return std::make_shared<Ledger>(ranks, wait_for_key(store, key, timeout, lost));
  } catch (const c10::Error& error) {
    const std::string why = lost();
    TESSERA_FAIL(CommError, "no ledger of the ranks on this machine: ",
                 why.empty() ? c10::str("rank ", leader, " keeps it; ", error.what_without_backtrace()) : why);
  }
}

// Those of this process, for an error that ends it.
std::mutex all_mutex;
std::vector<Watch*> all;

}  // namespace

Watch::Watch(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<Host>& hosts, int64_t rank,
             std::chrono::milliseconds timeout)
    : places_(hosts.size(), -1), rank_(rank), lost_(hosts.size()) {
  const Host& here = hosts[static_cast<size_t>(rank)];
  int64_t leader = -1;
  int local = 0;
  for (size_t r = 0; r < hosts.size(); r++) {
    if (hosts[r].machine != here.machine) continue;
    if (leader < 0) leader = static_cast<int64_t>(r);
    places_[r] = local++;
    // Ranks that are threads of this process share its fate.
    if (hosts[r].pid != here.pid)
      peers_.push_back({static_cast<int64_t>(r), places_[r], static_cast<pid_t>(hosts[r].pid)});
  }
  place_ = places_[static_cast<size_t>(rank)];
  const std::string key = c10::str("watch/ledger/", leader);
  if (leader == rank) {
    ledger_ = std::make_shared<Ledger>(local, "");
    store->set(key, bytes(ledger_->path()));
  } else {
    ledger_ =
        open_ledger(*store, key, local, leader, static_cast<pid_t>(hosts[static_cast<size_t>(leader)].pid), timeout);
  }
  ledger_->join(place_, look_at_process(getpid()).started);
  if (local < static_cast<int>(hosts.size())) far_ = store->clone();
}

// The thread has a share in it, too: it lives until both its owners and its thread are done.
std::shared_ptr<Watch> Watch::start(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<Host>& hosts,
                                    int64_t rank, std::chrono::milliseconds timeout) {
  const std::shared_ptr<Watch> watch(new Watch(store, hosts, rank, timeout));
  watch->thread_ = std::thread([watch] { watch->run(); });
  {
    std::lock_guard lock(all_mutex);
    all.push_back(watch.get());
  }
  return {watch.get(), [watch](Watch*) {
            {
              std::lock_guard lock(all_mutex);
              std::erase(all, watch.get());
            }
            watch->leave();
          }};
}

void Watch::all_failed(const std::string& message) {
  std::lock_guard lock(all_mutex);
  for (Watch* watch : all) watch->failed(c10::str("rank ", watch->rank_, " failed: ", message));
}

void Watch::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    groups_.clear();
  }
  wake_.notify_one();
  if (!thread_.joinable()) return;
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();  // it ends when it has freed what it was about to free
  else
    thread_.join();
}

void Watch::leave() {
  stop();
  if (ledger_->state(place_) == State::Running) ledger_->set_state(place_, State::Left);
}

void Watch::failed(const std::string& message) {
  ledger_->blame(rank_, message);
  ledger_->fail(place_, message);
}

std::shared_ptr<Journal> Watch::add(const std::string& name, const std::string& key, std::vector<int64_t> ranks,
                                    Free free) {
  std::lock_guard lock(mutex_);
  groups_.push_back({name, hash_of(key), std::move(ranks), std::move(free)});
  if (rows_ == Ledger::kGroups) return nullptr;
  return std::make_shared<Journal>(ledger_, place_, rows_++, groups_.back().key);
}

std::string Watch::lost(const std::vector<int64_t>& ranks) const {
  std::lock_guard lock(mutex_);
  const int64_t rank = culprit(ranks);
  return rank < 0 ? "" : reason(rank);
}

std::string Watch::cause_among(const std::vector<int64_t>& ranks) {
  std::unique_lock lock(mutex_);
  lost_one_.wait_for(lock, kNotices, [&] { return stopping_ || culprit(ranks) >= 0; });
  lock.unlock();
  return lost(ranks);
}

void Watch::run() {
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kBeat, [&] { return stopping_; })) {
    lock.unlock();
    beat();
    lock.lock();
  }
}

void Watch::beat() {
  ledger_->beat(place_);
  for (Peer& peer : peers_)
    if (const std::string why = look(peer); !why.empty()) lose(peer.rank, why);
  if (far_ && turns_++ % kFarEvery == 0) hear_from_far();
  free_groups();
}

std::string Watch::look(Peer& peer) {
  const State state = ledger_->state(peer.place);
  if (state == State::Failed) return ledger_->message(peer.place);
  if (state == State::Left) return "";
  const uint64_t beats = ledger_->beats(peer.place);
  if (beats != std::exchange(peer.beats, beats)) {
    peer.silent = peer.stopped = 0;
    return "";
  }
  if (++peer.silent < kSilent) return "";
  const Process process = look_at_process(peer.pid);
  const bool another = state == State::Running && process.started != ledger_->started(peer.place);
  if (!process.alive || another) {
    const State last = ledger_->state(peer.place);  // it may have left just before it ended
    if (last == State::Failed) return ledger_->message(peer.place);
    if (last == State::Left) return "";
    return c10::str("rank ", peer.rank, " (pid ", peer.pid, ") has died: killed, crashed, or ended without destroy()");
  }
  peer.stopped = process.stopped ? peer.stopped + 1 : 0;
  if (peer.stopped < kStopped) return "";
  return c10::str("rank ", peer.rank, " (pid ", peer.pid, ") is stopped by a signal (SIGSTOP or ^Z)");
}

void Watch::lose(int64_t rank, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    std::string& known = lost_[static_cast<size_t>(rank)];
    if (!known.empty()) return;
    known = why;
  }
  lost_one_.notify_all();
  ledger_->blame(rank, why);
  if (far_) try {
      far_->compareSet(kLostKey, {}, bytes(c10::str(rank, " ", why)));
    } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): those far away have lost the store as well
    }
}

void Watch::hear_from_far() {
  try {
    if (!far_->check({kLostKey})) return;
    const auto value = far_->get(kLostKey);
    const std::string text(value.begin(), value.end());
    const auto rank = static_cast<size_t>(std::stoll(text));
    std::lock_guard lock(mutex_);
    if (lost_.at(rank).empty()) lost_[rank] = text.substr(text.find(' ') + 1);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): collectives will tell
  }
}

// The first one lost on this machine if it is among `ranks`; else any of them that is.
int64_t Watch::culprit(const std::vector<int64_t>& ranks) const {
  const int64_t first = ledger_->first_lost();
  int64_t found = -1;
  for (const int64_t r : ranks)
    if (!lost_[static_cast<size_t>(r)].empty() && (found < 0 || r == first)) found = r;
  return found;
}

std::string Watch::reason(int64_t culprit) const {
  std::string why = lost_[static_cast<size_t>(culprit)];
  const int64_t first = ledger_->first_lost();
  if (first >= 0 && culprit != first && why.find(c10::str("rank ", first, " ")) == std::string::npos)
    why += "; before that, " + ledger_->first_reason();
  return why;
}

std::string Watch::last_words(const Watched& group, int64_t rank) const {
  const int place = places_[static_cast<size_t>(rank)];
  if (place < 0) return "";
  const Entry last = ledger_->last(place, group.key);
  if (last.group == 0) return c10::str("; it had posted nothing on group '", group.name, "'");
  return c10::str("; its last on group '", group.name, "' was ", to_text(last),
                  last.waits ? ", for which it waited" : "");
}

void Watch::free_groups() {
  std::vector<std::pair<Free, std::string>> todo;
  {
    std::lock_guard lock(mutex_);
    std::erase_if(groups_, [&](const Watched& group) {
      const int64_t rank = culprit(group.ranks);
      if (rank < 0) return false;
      todo.emplace_back(group.free, reason(rank) + last_words(group, rank));
      return true;
    });
  }
  for (const auto& [free, why] : todo) free(why);  // callbacks of futures may ask us again
}

}  // namespace tessera::comm::watch
