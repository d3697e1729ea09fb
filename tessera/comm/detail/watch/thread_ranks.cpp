#include "tessera/comm/detail/watch/thread_ranks.h"

#include "tessera/base/error_file.h"

#include <algorithm>

namespace tessera::comm::watch {

// The table lives as long as the store: a rank may fail and leave before another one has joined. A rank that joins a
// second time belongs to a later world with the same store.
std::shared_ptr<ThreadRanks> ThreadRanks::join(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank) {
  struct RanksOfStore {
    c10::weak_intrusive_ptr<c10d::Store> store;
    std::shared_ptr<ThreadRanks> ranks;
  };
  static std::mutex mutex;
  static auto* all = new std::vector<RanksOfStore>;
  const std::lock_guard lock(mutex);
  std::erase_if(*all, [](const RanksOfStore& known) { return known.store.expired(); });
  auto known = std::find_if(all->begin(), all->end(), [&](const auto& k) { return k.store.lock() == store; });
  if (known == all->end()) known = all->insert(known, {c10::weak_intrusive_ptr(store), nullptr});
  auto& ranks = known->ranks;
  if (!ranks || std::find(ranks->joined_.begin(), ranks->joined_.end(), rank) != ranks->joined_.end())
    ranks = std::make_shared<ThreadRanks>();
  ranks->joined_.push_back(rank);
  return ranks;
}

void ThreadRanks::add(int64_t rank, const std::vector<int64_t>& members, OnLost on_lost) {
  {
    const std::lock_guard lock(mutex_);
    groups_.push_back({rank, members, std::move(on_lost)});
  }
  abort_groups();
}

std::string ThreadRanks::lost(const std::vector<int64_t>& members) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, why] : failed_)
    if (std::find(members.begin(), members.end(), rank) != members.end()) {
      tessera::detail::note_culprit(rank, why);
      return why;
    }
  return "";
}

void ThreadRanks::report_failure(int64_t rank, const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    failed_.try_emplace(rank, why);
  }
  abort_groups();
}

void ThreadRanks::leave(int64_t rank) {
  const std::lock_guard no_calls(calls_mutex_);
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [&](const GroupOfRank& group) { return group.rank == rank; });
}

void ThreadRanks::abort_groups() {
  const std::lock_guard calls(calls_mutex_);
  std::vector<GroupOfRank> aborted;
  {
    const std::lock_guard lock(mutex_);
    const auto has_failed = [&](int64_t rank) { return failed_.contains(rank); };
    const auto kept = std::partition(groups_.begin(), groups_.end(), [&](const GroupOfRank& group) {
      return std::none_of(group.members.begin(), group.members.end(), has_failed);
    });
    aborted.assign(std::make_move_iterator(kept), std::make_move_iterator(groups_.end()));
    groups_.erase(kept, groups_.end());
  }
  for (const auto& group : aborted) group.on_lost(lost(group.members));
}

}  // namespace tessera::comm::watch
