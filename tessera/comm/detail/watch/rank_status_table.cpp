#include "tessera/comm/detail/watch/rank_status_table.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm::watch {
namespace {

static_assert(std::atomic<RankState>::is_always_lock_free);

// Writes the text if no other rank has started to. `state` becomes 1; the caller sets it to 2.
template <size_t N>
bool write_once(std::atomic<uint32_t>& state, char (&to)[N], const std::string& text) {
  uint32_t unwritten = 0;
  if (!state.compare_exchange_strong(unwritten, 1)) return false;
  const size_t size = std::min(text.size(), N - 1);
  std::memcpy(to, text.data(), size);
  to[size] = 0;
  return true;
}

}  // namespace

std::string to_text(const LastCollective& collective) {
  std::string text = c10::str(kind_name(collective.kind, collective.family), " #", collective.sequence);
  if (collective.tensor_name[0]) text += c10::str(" ('", collective.tensor_name, "')");
  return text;
}

RankStatusTable::RankStatusTable(int ranks, const std::string& path) {
  const size_t bytes = sizeof(FirstFailure) + static_cast<size_t>(ranks) * sizeof(RankRow);
  memory_ = path.empty() ? region::SharedMemory::make(bytes) : region::SharedMemory::open(path, bytes);
}

void RankStatusTable::join(int local_rank, uint64_t start_time) {
  rank(local_rank).start_time.store(start_time);
  rank(local_rank).state.store(RankState::Running);
}

void RankStatusTable::fail(int local_rank, const std::string& message) {
  RankRow& row = rank(local_rank);
  if (!write_once(row.message_state, row.message, message)) return;
  row.message_state.store(2);
  row.state.store(RankState::Failed);
}

std::string RankStatusTable::message(int local_rank) const {
  return rank(local_rank).message_state.load() == 2 ? rank(local_rank).message : "";
}

// Only this rank writes its rows. A reader retries if the version is odd or has changed.
void RankStatusTable::write(int local_rank, int row, const LastCollective& collective) {
  GroupRow& r = rank(local_rank).groups[row];
  r.version.fetch_add(1, std::memory_order_acq_rel);
  std::memcpy(&r.collective, &collective, sizeof(LastCollective));
  r.waiting.store(0, std::memory_order_relaxed);
  r.version.fetch_add(1, std::memory_order_release);
}

LastCollective RankStatusTable::last(int local_rank, uint64_t group) const {
  for (GroupRow& r : rank(local_rank).groups)
    for (int attempt = 0; attempt < 100; attempt++) {
      const uint32_t version = r.version.load(std::memory_order_acquire);
      LastCollective collective;
      std::memcpy(&collective, &r.collective, sizeof(LastCollective));
      collective.waiting = r.waiting.load(std::memory_order_relaxed) != 0;
      if (version % 2 != 0 || r.version.fetch_add(0, std::memory_order_acq_rel) != version) continue;
      if (collective.group == group) return collective;
      break;
    }
  return {};
}

void RankStatusTable::record_first_failure(int64_t global_rank, const std::string& why) {
  FirstFailure& f = first();
  if (!write_once(f.state, f.why, why)) return;
  f.rank = global_rank;
  f.state.store(2);
}

int64_t RankStatusTable::first_failed_rank() const { return first().state.load() == 2 ? first().rank : -1; }
std::string RankStatusTable::first_failure() const { return first().state.load() == 2 ? first().why : ""; }

}  // namespace tessera::comm::watch
