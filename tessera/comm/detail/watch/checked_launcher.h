#pragma once
#include "tessera/comm/detail/watch/comparer.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <mutex>

namespace tessera::comm::watch {

// Launches collectives on a backend that does not detect mismatched collectives and cannot be aborted.
//
//   1. run() publishes the collective of this rank and returns.
//   2. When all ranks have published and agree, the collective is posted to the backend, in the order of run().
//   3. wait() waits for the comparison, then for the backend. It fails at once if the group is aborted.
class CheckedLauncher : public std::enable_shared_from_this<CheckedLauncher> {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Launch = std::function<WorkPtr(c10d::Backend&)>;
  struct Names {        // for error messages
    std::string self;   // "rank 0"
    std::string group;  // "group 'dp' (ranks 0,1)"
  };
  CheckedLauncher(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Comparer> comparer, Names names,
                  std::chrono::milliseconds timeout);
  ~CheckedLauncher();

  // `later`: the launch may wait for the peers and run on another thread. False for device tensors, because their
  // backend uses the current stream of the calling thread.
  // `after`: runs when the collective has succeeded, before the returned Work completes.
  WorkPtr run(const region::CollectiveFingerprint& fingerprint, const SendRecvBytes& sizes, bool later, Launch launch,
              std::function<void()> after = {});
  WorkPtr track_p2p(WorkPtr work, std::string what);  // a send or recv: not compared, but aborted with the group
  void abort_with(const std::string& reason);
  void close();

  c10d::Backend& inner() { return *inner_; }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  class CheckedWork;
  class P2PWork;
  using CheckedWorkPtr = c10::intrusive_ptr<CheckedWork>;
  void launch_compared();
  void on_inner_done(const CheckedWorkPtr& work, c10::ivalue::Future& inner);
  void finish(const CheckedWorkPtr& work, const std::string& error);  // requires mutex_
  std::string with_context(const std::string& what, const std::string& why) const;

  c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<Comparer> comparer_;
  const Names names_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::mutex posting_;  // held while posting, so that comparer_ and queue_ have the same order

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<CheckedWorkPtr> queue_;     // not posted to the backend yet, oldest first
  std::vector<CheckedWorkPtr> running_;  // posted to the backend
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> p2p_works_;
  std::string abort_reason_;  // not empty: the group is unusable
};

}  // namespace tessera::comm::watch
