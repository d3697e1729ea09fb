#include "tessera/comm/detail/watch/checked_launcher.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/region/collective_fingerprint.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>

namespace tessera::comm::watch {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// If a peer is lost, the backend reports only a closed connection. The liveness monitor then aborts the group with the
// rank and the reason, within this time.
constexpr std::chrono::milliseconds kAbortReasonDelay(900);

std::string error_message(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known ? known->what_without_backtrace() : error.what();
}

std::exception_ptr comm_error(const std::string& text) {
  return std::make_exception_ptr(CommError({__func__, __FILE__, __LINE__}, text));
}

}  // namespace

// A collective of the launcher. The launcher's mutex protects all members except the future.
class CheckedLauncher::CheckedWork final : public c10d::Work {
 public:
  CheckedWork(std::shared_ptr<CheckedLauncher> launcher, std::string what, Launch launch, std::function<void()> after)
      : what(std::move(what)), launch(std::move(launch)), after(std::move(after)), launcher_(std::move(launcher)) {}

  bool isCompleted() override {
    launcher_->launch_compared();
    std::lock_guard lock(launcher_->mutex_);
    return done;
  }
  bool isSuccess() const override {
    std::lock_guard lock(launcher_->mutex_);
    return done && error.empty();
  }
  std::exception_ptr exception() const override {
    std::lock_guard lock(launcher_->mutex_);
    return error.empty() ? nullptr : comm_error(error);
  }
  void synchronize() override { wait(kNoTimeout); }
  FuturePtr getFuture() override { return future; }
  std::vector<at::Tensor> result() override {
    std::lock_guard lock(launcher_->mutex_);
    return inner ? inner->result() : std::vector<at::Tensor>();
  }
  bool wait(std::chrono::milliseconds timeout) override;

  const std::string what;  // "allreduce_ #4 ('wq.grad') of Float"
  Launch launch;
  std::function<void()> after;
  PendingCheckPtr check;
  WorkPtr inner;
  bool done = false;
  std::string error;  // valid once done; "": success
  const FuturePtr future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));

 private:
  std::shared_ptr<CheckedLauncher> launcher_;
};

bool CheckedLauncher::CheckedWork::wait(std::chrono::milliseconds timeout) {
  if (timeout == kNoTimeout) timeout = launcher_->timeout();
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  check->wait(timeout);
  launcher_->launch_compared();
  std::unique_lock lock(launcher_->mutex_);
  if (!launcher_->changed_.wait_until(lock, deadline, [&] { return done; }))
    TESSERA_FAIL(CommError,
                 launcher_->with_context(what, c10::str("all ranks have posted it, but it has not completed in ",
                                                        static_cast<double>(timeout.count()) / 1000.0, " s")));
  if (error.empty()) return true;
  launcher_->changed_.wait_for(lock, kAbortReasonDelay, [&] { return !launcher_->abort_reason_.empty(); });
  const std::string& reason = launcher_->abort_reason_;
  const bool included = reason.empty() || error.find(reason) != std::string::npos;
  TESSERA_FAIL(CommError, launcher_->with_context(what, included ? error : c10::str(reason, " (", error, ")")));
}

// A send or recv. Its wait() is the wait() of the backend, which abort() ends.
class CheckedLauncher::P2PWork final : public c10d::Work {
 public:
  P2PWork(std::shared_ptr<CheckedLauncher> launcher, WorkPtr inner, std::string what)
      : launcher_(std::move(launcher)), inner_(std::move(inner)), what_(std::move(what)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  int sourceRank() const override { return inner_->sourceRank(); }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout) override {
    std::string error = "aborted";
    try {
      if (inner_->wait(timeout)) return true;
    } catch (const std::exception& thrown) {
      error = error_message(thrown);
    }
    std::unique_lock lock(launcher_->mutex_);
    launcher_->changed_.wait_for(lock, kAbortReasonDelay, [&] { return !launcher_->abort_reason_.empty(); });
    const std::string& reason = launcher_->abort_reason_;
    TESSERA_FAIL(CommError,
                 launcher_->with_context(what_, reason.empty() ? error : c10::str(reason, " (", error, ")")));
  }
  void abort_inner() { inner_->abort(); }

 private:
  std::shared_ptr<CheckedLauncher> launcher_;
  WorkPtr inner_;
  std::string what_;
};

CheckedLauncher::CheckedLauncher(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Comparer> comparer,
                                 Names names, std::chrono::milliseconds timeout)
    : inner_(std::move(inner)), comparer_(std::move(comparer)), names_(std::move(names)), timeout_(timeout) {}

CheckedLauncher::~CheckedLauncher() = default;

std::string CheckedLauncher::with_context(const std::string& what, const std::string& why) const {
  if (why.find(what) != std::string::npos) return why;
  return c10::str(names_.self, ", ", what, " on ", names_.group, ": ", why);
}

CheckedLauncher::WorkPtr CheckedLauncher::run(const region::CollectiveFingerprint& fingerprint,
                                              const SendRecvBytes& sizes, bool later, Launch launch,
                                              std::function<void()> after) {
  auto work =
      c10::make_intrusive<CheckedWork>(shared_from_this(), describe(fingerprint), std::move(launch), std::move(after));
  {
    std::lock_guard order(posting_);
    {
      std::lock_guard lock(mutex_);
      TESSERA_CHECK(abort_reason_.empty(), CommError, with_context(work->what, abort_reason_));
    }
    const auto on_compared = [launcher = weak_from_this()] {
      if (auto alive = launcher.lock()) alive->launch_compared();
    };
    work->check = comparer_->post(fingerprint, sizes, later ? on_compared : std::function<void()>());
    std::lock_guard lock(mutex_);
    queue_.push_back(work);
  }
  if (!later) try {
      work->check->wait(timeout());
    } catch (...) {
      launch_compared();
      throw;
    }
  launch_compared();
  return work;
}

void CheckedLauncher::launch_compared() {
  std::vector<CheckedWorkPtr> launched;
  {
    at::AutoDispatchBelowADInplaceOrView below_autograd;  // this may be another thread than the caller's
    std::lock_guard lock(mutex_);
    while (!queue_.empty() && queue_.front()->check->done()) {
      const CheckedWorkPtr work = queue_.front();
      queue_.pop_front();
      std::string error = work->check->error();
      if (error.empty() && !abort_reason_.empty()) error = abort_reason_;
      if (error.empty()) try {
          work->inner = work->launch(*inner_);
          running_.push_back(work);
          launched.push_back(work);
        } catch (const std::exception& thrown) {
          error = error_message(thrown);
        }
      work->launch = nullptr;
      if (!error.empty()) {
        finish(work, error);
        launched.push_back(work);
      }
    }
  }
  changed_.notify_all();
  for (const CheckedWorkPtr& work : launched) {
    if (work->inner)
      work->inner->getFuture()->addCallback(
          [self = shared_from_this(), work](c10::ivalue::Future& inner) { self->on_inner_done(work, inner); });
    else
      work->future->setErrorIfNeeded(comm_error(work->error));
  }
}

void CheckedLauncher::finish(const CheckedWorkPtr& work, const std::string& error) {
  work->done = true;
  work->error = error;
}

void CheckedLauncher::on_inner_done(const CheckedWorkPtr& work, c10::ivalue::Future& inner) {
  std::string error = inner.hasError() ? inner.tryRetrieveErrorMessage() : "";
  std::function<void()> after;
  {
    std::lock_guard lock(mutex_);
    if (work->done) return;  // aborted before
    after = std::exchange(work->after, nullptr);
  }
  if (after && error.empty()) try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      after();
    } catch (const std::exception& thrown) {
      error = error_message(thrown);
    }
  {
    std::lock_guard lock(mutex_);
    if (work->done) return;
    finish(work, error);
    std::erase(running_, work);
  }
  changed_.notify_all();
  if (error.empty())
    work->future->markCompleted(inner.value());
  else
    work->future->setErrorIfNeeded(comm_error(with_context(work->what, error)));
}

CheckedLauncher::WorkPtr CheckedLauncher::track_p2p(WorkPtr work, std::string what) {
  auto track_p2p = c10::make_intrusive<P2PWork>(shared_from_this(), std::move(work), std::move(what));
  std::lock_guard lock(mutex_);
  std::erase_if(p2p_works_, [](const auto& each) { return each.expired(); });
  p2p_works_.emplace_back(c10::intrusive_ptr<c10d::Work>(track_p2p));
  return track_p2p;
}

void CheckedLauncher::abort_with(const std::string& reason) {
  std::vector<CheckedWorkPtr> aborted;
  {
    std::lock_guard lock(mutex_);
    if (!abort_reason_.empty()) return;
    abort_reason_ = reason;
    aborted = std::exchange(running_, {});
    for (const CheckedWorkPtr& work : aborted) finish(work, reason);
    for (const auto& each : p2p_works_)
      if (auto track_p2p = each.lock()) static_cast<P2PWork&>(*track_p2p).abort_inner();
  }
  comparer_->abort_with(reason);  // fails the collectives that are not posted yet
  changed_.notify_all();
  for (const CheckedWorkPtr& work : aborted)
    work->future->setErrorIfNeeded(comm_error(with_context(work->what, reason)));
}

// The threads of an aborted backend may be blocked in a collective, and its destructor would wait for them. The same
// holds if work is in flight. In these cases the backend is leaked until the process ends.
void CheckedLauncher::close() {
  comparer_->leave();
  c10::intrusive_ptr<c10d::Backend> inner;
  std::lock_guard order(posting_);
  {
    std::lock_guard lock(mutex_);
    inner = std::move(inner_);
    if (!abort_reason_.empty() || !running_.empty()) (void)inner.release();
    if (abort_reason_.empty()) abort_reason_ = "the group is closed";
  }
}

}  // namespace tessera::comm::watch
