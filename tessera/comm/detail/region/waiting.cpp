#include "tessera/base/error.h"
#include "tessera/comm/detail/region/exchange.h"

#include <sched.h>

#include <algorithm>

// Waiting, and who moves things meanwhile. A rank that waits moves all that can be moved in the group, and looks after
// what it has posted in other groups, because their peers may be waiting for it. Between looks it sleeps on the bell of
// the rank it waits for.
namespace tessera::comm::region {
namespace {

// The exchanges in which this thread has posted something that may still be under way.
struct Busy {
  Exchange* which;
  std::weak_ptr<Exchange> alive;
};
thread_local std::vector<Busy> busy;

constexpr auto kHelpEvery = std::chrono::microseconds(200);

// Announced before the condition is tested for the last time, so that no ring is lost between test and sleep.
class Sleeper {
 public:
  Sleeper(Region& region, int rank) : region_(region), rank_(rank) {
    region_.bell(rank_).sleepers.fetch_add(1);
    rung_ = region_.bell(rank_).rung.load();
  }
  ~Sleeper() { region_.bell(rank_).sleepers.fetch_sub(1); }
  void sleep(std::chrono::steady_clock::time_point until) { region_.sleep(rank_, rung_, until); }

 private:
  Region& region_;
  int rank_;
  uint32_t rung_;
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool listen(const Bell& bell, uint32_t rung, int spins) {
  for (int i = 0; i < spins; i++) {
    pause();
    if (bell.rung.load(std::memory_order_acquire) != rung) return true;
  }
  return false;
}
constexpr int kLeastSpins = 32, kMostSpins = 2048;

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1000.0; }

}  // namespace

Exchange::~Exchange() { stop(); }

std::string Exchange::late(const Operation& op, int missing, std::chrono::milliseconds timeout) const {
  return c10::str(name_of(rank_), " waited ", seconds(timeout), " s for ", name_of(missing), " in ",
                  describe(op.transfer.stamp), " on group '", names_.group, "' (ranks ", c10::Join(",", names_.ranks),
                  "); it has not come");
}

std::string Exchange::left(int rank) const {
  return c10::str(name_of(rank), " has left group '", names_.group, "' after ",
                  region_->member(rank).collectives.load(std::memory_order_relaxed),
                  " collectives, and this rank waits for it");
}

void Exchange::enlist() {
  for (const Busy& b : busy)
    if (b.which == this && !b.alive.expired()) return;
  busy.push_back({this, weak_from_this()});
}

// True if other groups may need this thread again soon.
bool Exchange::help_others() {
  bool any = false;
  const auto all = busy;  // a callback of a future may change it
  for (const Busy& b : all) {
    if (b.which == this) continue;
    const auto other = b.alive.lock();
    Lock lock;
    if (other) lock = Lock(other->mutex_, std::try_to_lock);
    if (other && !lock.owns_lock()) {  // somebody moves it already
      any = true;
      continue;
    }
    if (other) {
      other->advance_all();
      other->hand_out_futures(lock);
    }
    if (!other || (other->collectives_.empty() && other->messages_.empty()))
      std::erase_if(busy, [&](const Busy& idle) { return idle.which == b.which; });
    else
      any = true;
  }
  return any;
}

bool Exchange::drive(Lock& lock, const std::function<int()>& missing, Clock::time_point deadline) {
  for (;;) {
    advance_all();
    const int rank = missing();
    if (rank < 0) return true;
    hand_out_futures(lock);
    // Actively, where every rank has a core.
    const Bell& bell = region_->bell(rank);
    const uint32_t rung = bell.rung.load(std::memory_order_acquire);
    advance_all();
    if (missing() != rank) continue;
    if (const int spins = spins_; spins > 0) {
      lock.unlock();
      const bool heard = listen(bell, rung, spins);
      lock.lock();
      // Where it is in vain, because others use the cores or the peer is far behind, less is spent on it.
      spins_ = std::clamp(heard ? spins * 2 : spins / 2, kLeastSpins, kMostSpins);
      if (heard) continue;
    }
    lock.unlock();
    const bool helping = !busy.empty() && help_others();
    Sleeper sleeper(*region_, rank);
    lock.lock();
    advance_all();
    if (missing() != rank) continue;
    if (region_->poisoned()) {
      fail_as_told();
      return true;
    }
    if (region_->has_left(rank)) {
      advance_all();  // with what it gave before
      if (missing() != rank) continue;
      fail(left(rank));
      return true;
    }
    const auto now = Clock::now();
    if (now >= deadline) return false;
    const bool several = helping || (!collectives_.empty() && !messages_.empty()) || messages_.size() > 1;
    lock.unlock();
    sleeper.sleep(several ? std::min(deadline, now + kHelpEvery) : deadline);
    lock.lock();
  }
}

void Exchange::wait(Operation& op, std::chrono::milliseconds timeout) {
  if (!op.done.load(std::memory_order_acquire)) {
    Lock lock(mutex_);
    const auto missing = [&] {
      if (op.done.load(std::memory_order_acquire)) return -1;
      return op.peer >= 0 ? op.missing : collectives_.front()->missing;
    };
    if (!drive(lock, missing, Clock::now() + timeout)) {
      const Operation& oldest = op.peer >= 0 ? op : *collectives_.front();
      fail(late(oldest, missing(), timeout));
    }
    hand_out_futures(lock);
    TESSERA_CHECK(op.done, InternalError, "nobody to wait for, but the operation is not done");
  }
  if (std::string error = error_of(op); !error.empty()) TESSERA_FAIL(CommError, error);
}

bool Exchange::poll(Operation& op) {
  if (op.done.load(std::memory_order_acquire)) return true;
  Lock lock(mutex_);
  advance_all();
  if (region_->poisoned()) fail_as_told();
  const auto missing = [&] {
    return op.peer >= 0 || collectives_.empty() ? op.missing : collectives_.front()->missing;
  };
  if (const int rank = missing(); !op.done && rank >= 0 && region_->has_left(rank)) {
    advance_all();
    if (!op.done && missing() == rank) fail(left(rank));
  }
  hand_out_futures(lock);
  return op.done.load(std::memory_order_acquire);
}

std::string Exchange::error_of(const Operation& op) {
  std::lock_guard lock(mutex_);
  return op.error;
}

FuturePtr Exchange::future(Operation& op, const std::vector<at::Tensor>& results) {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  Lock lock(mutex_);
  if (op.future) return op.future;
  op.future = future;
  op.results = results;
  futures_++;
  if (op.done.load(std::memory_order_acquire)) {
    handing_out_.push_back(OperationPtr::unsafe_reclaim_from_nonowning(&op));
    hand_out_futures(lock);
  } else {
    if (stopping_) fail(c10::str("group '", names_.group, "' is closed"));
    if (!stopping_ && !thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->progress(); });
    asked_.notify_one();
    hand_out_futures(lock);
  }
  return future;
}

// Callbacks of a future may post again, so they are run without the lock.
void Exchange::hand_out_futures(Lock& lock) {
  while (!handing_out_.empty()) {
    auto complete = std::exchange(handing_out_, {});
    futures_ -= complete.size();
    lock.unlock();
    for (const OperationPtr& op : complete) {
      if (op->error.empty())
        op->future->markCompleted(c10::IValue(std::exchange(op->results, {})));
      else
        op->future->setError(std::make_exception_ptr(CommError({__func__, __FILE__, __LINE__}, op->error)));
    }
    lock.lock();
  }
}

void Exchange::progress() {
  Lock lock(mutex_);
  for (;;) {
    asked_.wait(lock, [&] { return stopping_ || futures_ > 0; });
    if (stopping_) return;
    const auto oldest = [&] {
      return !collectives_.empty() ? collectives_.front() : !messages_.empty() ? messages_[0] : nullptr;
    };
    const OperationPtr op = oldest();  // each has the whole time
    const auto missing = [&] { return stopping_ || !op || oldest() != op ? -1 : op->missing; };
    if (!drive(lock, missing, Clock::now() + timeout())) fail(late(*op, op->missing, timeout()));
    hand_out_futures(lock);
  }
}

void Exchange::leave(uint64_t uncounted) {
  stop();
  std::lock_guard lock(mutex_);
  region_->leave(rank_, posted_ - std::min(posted_, uncounted));
}

void Exchange::stop() {
  Lock lock(mutex_);
  stopping_ = true;
  if (futures_ > 0)
    fail(c10::str(name_of(rank_), " left group '", names_.group, "' with ", collectives_.size() + messages_.size(),
                  " operations under way"));
  hand_out_futures(lock);
  std::thread thread = std::move(thread_);
  lock.unlock();
  asked_.notify_one();
  if (!thread.joinable()) return;
  for (int r = 0; r < size_; r++) region_->ring(r);  // it may sleep on any of them
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();  // called by a callback of a future
  else
    thread.join();
}

}  // namespace tessera::comm::region
