#include "tessera/comm/detail/watch/ledger.h"

#include <algorithm>
#include <cstring>

namespace tessera::comm::watch {
namespace {

static_assert(std::atomic<State>::is_always_lock_free);

// Where two may write at once, the first one does.
template <size_t N>
bool write_once(std::atomic<uint32_t>& ready, char (&place)[N], const std::string& text) {
  uint32_t free = 0;
  if (!ready.compare_exchange_strong(free, 1)) return false;
  const size_t size = std::min(text.size(), N - 1);
  std::memcpy(place, text.data(), size);
  place[size] = 0;
  return true;
}

}  // namespace

std::string to_text(const Entry& entry) {
  std::string text = c10::str(kind_name(entry.kind, entry.family), " #", entry.sequence);
  if (entry.tensor_name[0]) text += c10::str(" ('", entry.tensor_name, "')");
  return text;
}

Ledger::Ledger(int ranks, const std::string& path) {
  const size_t bytes = sizeof(First) + static_cast<size_t>(ranks) * sizeof(Rank);
  memory_ = path.empty() ? region::SharedMemory::make(bytes) : region::SharedMemory::open(path, bytes);
}

void Ledger::join(int place, uint64_t started) {
  rank(place).started.store(started);
  rank(place).state.store(State::Running);
}

void Ledger::fail(int place, const std::string& message) {
  Rank& me = rank(place);
  if (!write_once(me.message_ready, me.message, message)) return;
  me.message_ready.store(2);
  me.state.store(State::Failed);
}

std::string Ledger::message(int place) const {
  return rank(place).message_ready.load() == 2 ? rank(place).message : "";
}

// Only this rank writes its rows; a reader that finds a version odd, or changed, tries again.
void Ledger::write(int place, int row, const Entry& entry) {
  Row& r = rank(place).rows[row];
  r.version.fetch_add(1, std::memory_order_acq_rel);
  std::memcpy(&r.entry, &entry, sizeof(Entry));
  r.waits.store(0, std::memory_order_relaxed);
  r.version.fetch_add(1, std::memory_order_release);
}

Entry Ledger::last(int place, uint64_t group) const {
  for (Row& r : rank(place).rows)
    for (int attempt = 0; attempt < 100; attempt++) {
      const uint32_t version = r.version.load(std::memory_order_acquire);
      Entry entry;
      std::memcpy(&entry, &r.entry, sizeof(Entry));
      entry.waits = r.waits.load(std::memory_order_relaxed) != 0;
      if (version % 2 != 0 || r.version.fetch_add(0, std::memory_order_acq_rel) != version) continue;
      if (entry.group == group) return entry;
      break;
    }
  return {};
}

void Ledger::blame(int64_t global_rank, const std::string& why) {
  First& f = first();
  if (!write_once(f.ready, f.why, why)) return;
  f.rank = global_rank;
  f.ready.store(2);
}

int64_t Ledger::first_lost() const { return first().ready.load() == 2 ? first().rank : -1; }
std::string Ledger::first_reason() const { return first().ready.load() == 2 ? first().why : ""; }

}  // namespace tessera::comm::watch
