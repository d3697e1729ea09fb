#pragma once
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace tessera::comm::watch {

// The ranks of one world that are threads of this process. They end together, so no rank monitors them
// (LivenessMonitor). But one of them may fail while the others wait for it, in a group that it has not created, or in
// an exchange through the store. This table tells them.
class ThreadRanks {
 public:
  // Each rank calls it once per world. The ranks of one world pass the same store.
  static std::shared_ptr<ThreadRanks> join(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank);

  // Adds a group of `rank`. Calls `on_lost` with the reason when one of `members` fails, at once if one has failed.
  using OnLost = std::function<void(const std::string& why)>;
  void add(int64_t rank, const std::vector<int64_t>& members, OnLost on_lost);
  std::string lost(const std::vector<int64_t>& members) const;  // why a member has failed; "": none has
  void report_failure(int64_t rank, const std::string& why);
  void leave(int64_t rank);  // no group of this rank is aborted any more

 private:
  struct GroupOfRank {
    int64_t rank;
    std::vector<int64_t> members;
    OnLost on_lost;
  };
  void abort_groups();

  mutable std::mutex mutex_;
  std::vector<int64_t> joined_;
  std::map<int64_t, std::string> failed_;  // by rank: why
  std::vector<GroupOfRank> groups_;
  std::recursive_mutex calls_mutex_;  // held while on_lost runs; its callbacks may report a failure too
};

}  // namespace tessera::comm::watch
