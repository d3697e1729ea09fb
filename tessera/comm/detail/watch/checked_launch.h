#pragma once
#include "tessera/comm/detail/watch/comparer.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <condition_variable>
#include <deque>
#include <mutex>

// Stands before a backend that neither notices that ranks disagree nor can be told to give up.
//
//   run       what this rank is about to post is published; nobody waits
//   compared  all have published and agree: only now it is posted to the backend, in the order of run()
//   wait      for the one, then for the other; ends at once, with the reason, when the group is poisoned
namespace tessera::comm::watch {

class Guard : public std::enable_shared_from_this<Guard> {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Launch = std::function<WorkPtr(c10d::Backend&)>;
  struct Names {
    std::string self;   // "rank 0"
    std::string group;  // "group 'dp' (ranks 0,1)"
  };
  Guard(c10::intrusive_ptr<c10d::Backend> inner, std::shared_ptr<Comparer> comparer, Names names,
        std::chrono::milliseconds timeout);
  ~Guard();

  // `later`: posting may wait for the peers, and be done by another thread. False for tensors of a device, whose
  // backend looks at the current stream of the caller.
  // `after`: runs once it has completed well, before anybody hears of it.
  WorkPtr run(const region::Stamp& stamp, const Claim& claim, bool later, Launch launch,
              std::function<void()> after = {});
  WorkPtr message(WorkPtr work, std::string what);  // a send or recv: not compared, but freed with the group
  void poison(const std::string& reason);
  void close();

  c10d::Backend& inner() { return *inner_; }
  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  class Guarded;
  class Message;
  using GuardedPtr = c10::intrusive_ptr<Guarded>;
  void pump();
  void finished(const GuardedPtr& work, c10::ivalue::Future& inner);
  void settle(const GuardedPtr& work, const std::string& error);  // needs mutex_
  std::string in(const std::string& what, const std::string& why) const;

  c10::intrusive_ptr<c10d::Backend> inner_;
  const std::shared_ptr<Comparer> comparer_;
  const Names names_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::mutex posting_;  // held while posting, so that the two queues have one order

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<GuardedPtr> compared_;  // or not yet; to be posted, oldest first
  std::vector<GuardedPtr> running_;  // posted
  std::vector<c10::weak_intrusive_ptr<c10d::Work>> messages_;
  std::string lost_;  // not empty: the group is of no use any more
};

}  // namespace tessera::comm::watch
