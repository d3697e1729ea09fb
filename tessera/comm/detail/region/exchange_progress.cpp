#include "tessera/base/error.h"
#include "tessera/comm/detail/region/exchange.h"

#include <sched.h>

#include <algorithm>

// Waiting, and progress while waiting. A rank that waits advances all operations of the group. It also advances what it
// has posted in other groups, because peers there may wait for this rank. In between it sleeps on the doorbell of the
// rank that it waits for.
namespace tessera::comm::region {
namespace {

// The exchanges in which this thread has posted operations that may still be in flight.
struct ActiveExchange {
  Exchange* exchange;
  std::weak_ptr<Exchange> alive;
};
thread_local std::vector<ActiveExchange> active_exchanges;

constexpr auto kOtherGroupsInterval = std::chrono::microseconds(200);

// Registers a waiter before the last test of the condition, so that no ring is missed between test and sleep.
class DoorbellWaiter {
 public:
  DoorbellWaiter(Region& region, int rank) : region_(region), rank_(rank) {
    region_.doorbell(rank_).waiters.fetch_add(1);
    rings_ = region_.doorbell(rank_).rings.load();
  }
  ~DoorbellWaiter() { region_.doorbell(rank_).waiters.fetch_sub(1); }
  void sleep(std::chrono::steady_clock::time_point until) { region_.sleep(rank_, rings_, until); }

 private:
  Region& region_;
  int rank_;
  uint32_t rings_;
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

bool spin_until_rung(const Doorbell& doorbell, uint32_t rings, int spins) {
  for (int i = 0; i < spins; i++) {
    pause();
    if (doorbell.rings.load(std::memory_order_acquire) != rings) return true;
  }
  return false;
}
constexpr int kMinSpins = 32, kMaxSpins = 2048;

double seconds(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1000.0; }

}  // namespace

Exchange::~Exchange() { stop(); }

std::string Exchange::timeout_message(const Operation& op, int awaited_rank, std::chrono::milliseconds timeout) const {
  return c10::str(name_of(rank_), " waited ", seconds(timeout), " s for ", name_of(awaited_rank), " in ",
                  describe(op.transfer.fingerprint), " on group '", group_.group, "' (ranks ",
                  c10::Join(",", group_.ranks), "); it has not responded");
}

std::string Exchange::left_message(int rank) const {
  return c10::str(name_of(rank), " has left group '", group_.group, "' after ",
                  region_->member(rank).collectives.load(std::memory_order_relaxed),
                  " collectives, but this rank waits for it");
}

void Exchange::mark_active() {
  for (const ActiveExchange& b : active_exchanges)
    if (b.exchange == this && !b.alive.expired()) return;
  active_exchanges.push_back({this, weak_from_this()});
}

// True if another group may soon need this thread again.
bool Exchange::progress_other_groups() {
  bool any = false;
  const auto all = active_exchanges;  // a copy: a callback of a future may change the list
  for (const ActiveExchange& b : all) {
    if (b.exchange == this) continue;
    const auto other = b.alive.lock();
    Lock lock;
    if (other) lock = Lock(other->mutex_, std::try_to_lock);
    if (other && !lock.owns_lock()) {  // another thread advances it
      any = true;
      continue;
    }
    if (other) {
      other->advance_all();
      other->complete_futures(lock);
    }
    if (!other || (other->collectives_.empty() && other->messages_.empty()))
      std::erase_if(active_exchanges, [&](const ActiveExchange& idle) { return idle.exchange == b.exchange; });
    else
      any = true;
  }
  return any;
}

bool Exchange::progress_until(Lock& lock, const std::function<int()>& awaited_rank, Clock::time_point deadline) {
  for (;;) {
    advance_all();
    const int rank = awaited_rank();
    if (rank < 0) return true;
    complete_futures(lock);
    // Busy-wait first, if every rank has its own core.
    const Doorbell& doorbell = region_->doorbell(rank);
    const uint32_t rings = doorbell.rings.load(std::memory_order_acquire);
    advance_all();
    if (awaited_rank() != rank) continue;
    if (const int spins = spins_; spins > 0) {
      lock.unlock();
      const bool rang = spin_until_rung(doorbell, rings, spins);
      lock.lock();
      // Spin less if it does not help: other processes use the cores, or the peer is far behind.
      spins_ = std::clamp(rang ? spins * 2 : spins / 2, kMinSpins, kMaxSpins);
      if (rang) continue;
    }
    lock.unlock();
    const bool helping = !active_exchanges.empty() && progress_other_groups();
    DoorbellWaiter waiter(*region_, rank);
    lock.lock();
    advance_all();
    if (awaited_rank() != rank) continue;
    if (region_->aborted()) {
      fail_with_abort_reason();
      return true;
    }
    if (region_->has_left(rank)) {
      advance_all();  // with the data that it published before
      if (awaited_rank() != rank) continue;
      fail(left_message(rank), rank);
      return true;
    }
    const auto now = Clock::now();
    if (now >= deadline) return false;
    const bool several = helping || (!collectives_.empty() && !messages_.empty()) || messages_.size() > 1;
    lock.unlock();
    waiter.sleep(several ? std::min(deadline, now + kOtherGroupsInterval) : deadline);
    lock.lock();
  }
}

void Exchange::wait(Operation& op, std::chrono::milliseconds timeout) {
  if (!op.done.load(std::memory_order_acquire)) {
    Lock lock(mutex_);
    const auto awaited_rank = [&] {
      if (op.done.load(std::memory_order_acquire)) return -1;
      return op.peer >= 0 ? op.awaited_rank : collectives_.front()->awaited_rank;
    };
    if (!progress_until(lock, awaited_rank, Clock::now() + timeout)) {
      const Operation& oldest = op.peer >= 0 ? op : *collectives_.front();
      const int late = awaited_rank();
      fail(timeout_message(oldest, late, timeout), late);
    }
    complete_futures(lock);
    TESSERA_CHECK(op.done, InternalError, "no rank to wait for, but the operation is not done");
  }
  if (std::string error = error_of(op); !error.empty()) TESSERA_FAIL(CommError, error);
}

bool Exchange::poll(Operation& op) {
  if (op.done.load(std::memory_order_acquire)) return true;
  Lock lock(mutex_);
  advance_all();
  if (region_->aborted()) fail_with_abort_reason();
  const auto awaited_rank = [&] {
    return op.peer >= 0 || collectives_.empty() ? op.awaited_rank : collectives_.front()->awaited_rank;
  };
  if (const int rank = awaited_rank(); !op.done && rank >= 0 && region_->has_left(rank)) {
    advance_all();
    if (!op.done && awaited_rank() == rank) fail(left_message(rank), rank);
  }
  complete_futures(lock);
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
    futures_to_complete_.push_back(OperationPtr::unsafe_reclaim_from_nonowning(&op));
    complete_futures(lock);
  } else {
    if (stopping_) fail(c10::str("group '", group_.group, "' is closed"));
    want_progress();
    complete_futures(lock);
  }
  return future;
}

// Runs without the lock, because callbacks of a future may post.
void Exchange::complete_futures(Lock& lock) {
  while (!futures_to_complete_.empty()) {
    auto complete = std::exchange(futures_to_complete_, {});
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

void Exchange::want_progress() {
  if (stopping_) return;
  if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run_progress_thread(); });
  progress_wanted_.notify_one();
}

// A peer that has left, or an abort, fails a send only when somebody waits for it.
OperationPtr Exchange::waiting_send() const {
  if (region_->aborted()) return nullptr;
  for (const OperationPtr& op : messages_)
    if (op->sends && !op->future && !region_->has_left(op->peer)) return op;
  return nullptr;
}

void Exchange::run_progress_thread() {
  Lock lock(mutex_);
  for (;;) {
    progress_wanted_.wait(lock, [&] { return stopping_ || futures_ > 0 || waiting_send(); });
    if (stopping_) return;
    if (futures_ == 0) {
      const OperationPtr send = waiting_send();
      const auto awaited_rank = [&] {
        return stopping_ || futures_ > 0 || waiting_send() != send ? -1 : send->awaited_rank;
      };
      progress_until(lock, awaited_rank, Clock::time_point::max());
    } else {
      const auto oldest = [&] {
        return !collectives_.empty() ? collectives_.front() : !messages_.empty() ? messages_[0] : nullptr;
      };
      const OperationPtr op = oldest();  // each operation gets the full timeout
      const auto awaited_rank = [&] { return stopping_ || !op || oldest() != op ? -1 : op->awaited_rank; };
      if (!progress_until(lock, awaited_rank, Clock::now() + timeout()))
        fail(timeout_message(*op, op->awaited_rank, timeout()), op->awaited_rank);
    }
    complete_futures(lock);
  }
}

void Exchange::leave(uint64_t internal_collectives) {
  stop();
  std::lock_guard lock(mutex_);
  region_->leave(rank_, posted_ - std::min(posted_, internal_collectives));
}

void Exchange::stop() {
  Lock lock(mutex_);
  stopping_ = true;
  if (futures_ > 0)
    fail(c10::str(name_of(rank_), " left group '", group_.group, "' with ", collectives_.size() + messages_.size(),
                  " operations in flight"));
  complete_futures(lock);
  std::thread thread = std::move(thread_);
  lock.unlock();
  progress_wanted_.notify_one();
  if (!thread.joinable()) return;
  for (int r = 0; r < size_; r++) region_->ring(r);  // the thread may sleep on any doorbell
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();  // stop() was called by a callback of a future
  else
    thread.join();
}

}  // namespace tessera::comm::region
