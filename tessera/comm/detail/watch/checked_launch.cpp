#include "tessera/comm/detail/watch/checked_launch.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/collective_stamp.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace tessera::comm::watch {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// What a backend says of a lost peer is that a connection was closed. Who it was, the watch knows soon after.
constexpr std::chrono::milliseconds kToBeTold(900);

std::string message_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known ? known->what_without_backtrace() : error.what();
}

std::exception_ptr comm_error(const std::string& text) {
  return std::make_exception_ptr(CommError({__func__, __FILE__, __LINE__}, text));
}

}  // namespace

// A collective on its way through the guard. All but the future belongs to the guard's mutex.
class Guard::Guarded final : public c10d::Work {
 public:
  Guarded(std::shared_ptr<Guard> guard, std::string what, Launch launch, std::function<void()> after)
      : what(std::move(what)), launch(std::move(launch)), after(std::move(after)), guard_(std::move(guard)) {}

  bool isCompleted() override {
    guard_->pump();
    std::lock_guard lock(guard_->mutex_);
    return settled;
  }
  bool isSuccess() const override {
    std::lock_guard lock(guard_->mutex_);
    return settled && error.empty();
  }
  std::exception_ptr exception() const override {
    std::lock_guard lock(guard_->mutex_);
    return error.empty() ? nullptr : comm_error(error);
  }
  void synchronize() override { wait(kNoTimeout); }
  FuturePtr getFuture() override { return future; }
  std::vector<at::Tensor> result() override {
    std::lock_guard lock(guard_->mutex_);
    return inner ? inner->result() : std::vector<at::Tensor>();
  }
  bool wait(std::chrono::milliseconds timeout) override;

  const std::string what;  // "allreduce_ #4 ('wq.grad') of Float"
  Launch launch;
  std::function<void()> after;
  CheckPtr check;
  WorkPtr inner;
  bool settled = false;
  std::string error;  // of a settled one; "": it went well
  const FuturePtr future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));

 private:
  std::shared_ptr<Guard> guard_;
};

bool Guard::Guarded::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) timeout = guard_->timeout();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  check->wait(timeout);
  guard_->pump();
  std::unique_lock lock(guard_->mutex_);
  if (!guard_->changed_.wait_until(lock, deadline, [&] { return settled; }))
    TESSERA_FAIL(CommError, guard_->in(what, c10::str("all ranks have posted it, but it has not completed in ",
                                                      static_cast<double>(timeout.count()) / 1000.0, " s")));
  if (error.empty()) return true;
  guard_->changed_.wait_for(lock, kToBeTold, [&] { return !guard_->lost_.empty(); });
  const std::string& lost = guard_->lost_;
  const bool known = lost.empty() || error.find(lost) != std::string::npos;
  TESSERA_FAIL(CommError, guard_->in(what, known ? error : c10::str(lost, " (", error, ")")));
}

// A send or recv. Its wait() is the backend's, ended by abort().
class Guard::Message final : public c10d::Work {
 public:
  Message(std::shared_ptr<Guard> guard, WorkPtr inner, std::string what)
      : guard_(std::move(guard)), inner_(std::move(inner)), what_(std::move(what)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    std::string error = "given up";
    try {
      if (inner_->wait(timeout)) return true;
    } catch (const std::exception& thrown) {
      error = message_of(thrown);
    }
    std::unique_lock lock(guard_->mutex_);
    guard_->changed_.wait_for(lock, kToBeTold, [&] { return !guard_->lost_.empty(); });
    const std::string& lost = guard_->lost_;
    TESSERA_FAIL(CommError, guard_->in(what_, lost.empty() ? error : c10::str(lost, " (", error, ")")));
  }
  void give_up() { inner_->abort(); }

 private:
  std::shared_ptr<Guard> guard_;
  WorkPtr inner_;
  std::string what_;
};

Guard::Guard(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Comparer> comparer, Names names,
             std::chrono::milliseconds timeout)
    : inner_(std::move(inner)), comparer_(std::move(comparer)), names_(std::move(names)), timeout_(timeout) {}

Guard::~Guard() = default;

std::string Guard::in(const std::string& what, const std::string& why) const {
  if (why.find(what) != std::string::npos) return why;
  return c10::str(names_.self, ", ", what, " on ", names_.group, ": ", why);
}

Guard::WorkPtr Guard::run(const region::Stamp& stamp, const Claim& claim, bool later, Launch launch,
                          std::function<void()> after) {
  auto work = c10::make_intrusive<Guarded>(shared_from_this(), describe(stamp), std::move(launch), std::move(after));
  {
    std::lock_guard order(posting_);
    {
      std::lock_guard lock(mutex_);
      TESSERA_CHECK(lost_.empty(), CommError, in(work->what, lost_));
    }
    const auto when_compared = [guard = weak_from_this()] {
      if (auto alive = guard.lock()) alive->pump();
    };
    work->check = comparer_->post(stamp, claim, later ? when_compared : std::function<void()>());
    std::lock_guard lock(mutex_);
    compared_.push_back(work);
  }
  if (!later) try {
      work->check->wait(timeout());
    } catch (...) {
      pump();
      throw;
    }
  pump();
  return work;
}

void Guard::pump() {
  std::vector<GuardedPtr> launched;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;  // it may run on a thread that knows of none
    std::lock_guard lock(mutex_);
    while (!compared_.empty() && compared_.front()->check->done()) {
      const GuardedPtr work = compared_.front();
      compared_.pop_front();
      std::string error = work->check->error();
      if (error.empty() && !lost_.empty()) error = lost_;
      if (error.empty()) try {
          work->inner = work->launch(*inner_);
          running_.push_back(work);
          launched.push_back(work);
        } catch (const std::exception& thrown) {
          error = message_of(thrown);
        }
      work->launch = nullptr;
      if (!error.empty()) {
        settle(work, error);
        launched.push_back(work);
      }
    }
  }
  changed_.notify_all();
  for (const GuardedPtr& work : launched) {
    if (work->inner)
      work->inner->getFuture()->addCallback(
          [self = shared_from_this(), work](c10::ivalue::Future& inner) { self->finished(work, inner); });
    else
      work->future->setErrorIfNeeded(comm_error(work->error));
  }
}

void Guard::settle(const GuardedPtr& work, const std::string& error) {
  work->settled = true;
  work->error = error;
}

void Guard::finished(const GuardedPtr& work, c10::ivalue::Future& inner) {
  std::string error = inner.hasError() ? inner.tryRetrieveErrorMessage() : "";
  std::function<void()> after;
  {
    std::lock_guard lock(mutex_);
    if (work->settled) return;  // given up before
    after = std::exchange(work->after, nullptr);
  }
  if (after && error.empty()) try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      after();
    } catch (const std::exception& thrown) {
      error = message_of(thrown);
    }
  {
    std::lock_guard lock(mutex_);
    if (work->settled) return;
    settle(work, error);
    std::erase(running_, work);
  }
  changed_.notify_all();
  if (error.empty())
    work->future->markCompleted(inner.value());
  else
    work->future->setErrorIfNeeded(comm_error(in(work->what, error)));
}

Guard::WorkPtr Guard::message(WorkPtr work, std::string what) {
  auto message = c10::make_intrusive<Message>(shared_from_this(), std::move(work), std::move(what));
  std::lock_guard lock(mutex_);
  std::erase_if(messages_, [](const auto& each) { return each.expired(); });
  messages_.emplace_back(c10::intrusive_ptr<c10d::Work>(message));
  return message;
}

void Guard::poison(const std::string& reason) {
  std::vector<GuardedPtr> given_up;
  {
    std::lock_guard lock(mutex_);
    if (!lost_.empty()) return;
    lost_ = reason;
    given_up = std::exchange(running_, {});
    for (const GuardedPtr& work : given_up) settle(work, reason);
    for (const auto& each : messages_)
      if (auto message = each.lock()) static_cast<Message&>(*message).give_up();
  }
  comparer_->poison(reason);  // those that are not posted yet fail with it
  changed_.notify_all();
  for (const GuardedPtr& work : given_up) work->future->setErrorIfNeeded(comm_error(in(work->what, reason)));
}

// The threads of a backend that was given up, or left with work under way, may hang in a collective, and its
// destructor would wait for them: then it is left as it is, until the process ends.
void Guard::close() {
  comparer_->leave();
  c10::intrusive_ptr<c10d::Backend> inner;
  std::lock_guard order(posting_);
  {
    std::lock_guard lock(mutex_);
    inner = std::move(inner_);
    if (!lost_.empty() || !running_.empty()) (void)inner.release();
    if (lost_.empty()) lost_ = "the group is closed";
  }
}

}  // namespace tessera::comm::watch
