#include "tessera/comm/detail/region/region.h"

#include "tessera/base/detail/settings.h"
#include "tessera/base/error_file.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <ctime>

namespace tessera::comm::region {
namespace {
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

size_t count(int n) { return static_cast<size_t>(n); }
}  // namespace

size_t RegionLayout::members() const { return sizeof(RegionHeader); }
size_t RegionLayout::doorbells() const { return members() + count(ranks) * sizeof(Member); }
size_t RegionLayout::slots() const { return doorbells() + count(ranks) * sizeof(Doorbell); }
size_t RegionLayout::chunk_counters() const { return slots() + count(ranks * kRing) * sizeof(Slot); }
size_t RegionLayout::channels() const { return chunk_counters() + count(ranks) * sizeof(ChunkCounters); }
size_t RegionLayout::slot_data() const { return channels() + count(ranks * ranks) * sizeof(P2PChannel); }
size_t RegionLayout::staging_data() const {
  return slot_data() + count(ranks * kRing) * static_cast<size_t>(slot_bytes);
}
size_t RegionLayout::channel_data() const {
  return staging_data() + count(ranks * kStagingBuffers) * static_cast<size_t>(staging_bytes);
}
size_t RegionLayout::total() const {
  return channel_data() + count(ranks * ranks) * static_cast<size_t>(channel_bytes);
}

RegionLayout RegionLayout::of(int ranks) {
  RegionLayout layout;
  layout.ranks = ranks;
  // A slot must hold one length per peer. A staging buffer must hold one cache line per peer.
  layout.slot_bytes = round_up_to_line(std::max<int64_t>(setting_int("TESSERA_SLOT_BYTES"), 64 + 8 * ranks));
  layout.staging_bytes = round_up_to_line(std::max<int64_t>(setting_int("TESSERA_STAGE_BYTES"), 64 * ranks));
  layout.channel_bytes = round_up_to_line(std::clamp<int64_t>((1 << 20) / ranks, 4 << 10, 64 << 10));
  return layout;
}

char* Region::slot_data(int rank, int index) {
  return base_ + layout_.slot_data() + count(rank * kRing + index) * static_cast<size_t>(layout_.slot_bytes);
}
char* Region::staging_buffer(int rank, uint64_t chunk) {
  const size_t index = count(rank * kStagingBuffers) + chunk % kStagingBuffers;
  return base_ + layout_.staging_data() + index * static_cast<size_t>(layout_.staging_bytes);
}
char* Region::channel_ring(int from, int to) {
  return base_ + layout_.channel_data() + count(from * layout_.ranks + to) * static_cast<size_t>(layout_.channel_bytes);
}

// The waiter increments `waiters`, reads `rings`, tests the condition, and sleeps if `rings` is unchanged.
// The other rank changes the counter, increments `rings`, and reads `waiters`.
// All are sequentially consistent, so either the other rank sees the waiter, or the waiter sees the change.
void Region::ring(int rank) {
  Doorbell& b = doorbell(rank);
  b.rings.fetch_add(1);
  if (b.waiters.load() != 0)
    syscall(SYS_futex, &b.rings, FUTEX_WAKE | (shared_ ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX, nullptr, nullptr, 0);
}

void Region::sleep(int rank, uint32_t rings, std::chrono::steady_clock::time_point until) {
  const auto left =
      std::chrono::duration_cast<std::chrono::nanoseconds>(until - std::chrono::steady_clock::now()).count();
  if (left <= 0) return;
  timespec wait{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
  syscall(SYS_futex, &doorbell(rank).rings, FUTEX_WAIT | (shared_ ? 0 : FUTEX_PRIVATE_FLAG), rings, &wait, nullptr, 0);
}

void Region::leave(int rank, uint64_t collectives) {
  member(rank).collectives.store(collectives, std::memory_order_relaxed);
  member(rank).left.store(1);
  ring(rank);
}

void Region::abort(const std::string& reason) {
  RegionHeader& h = header();
  uint32_t not_aborted = 0;
  if (h.abort_state.compare_exchange_strong(not_aborted, 1)) {
    const size_t length = std::min(reason.size(), sizeof(h.reason) - 1);
    std::memcpy(h.reason, reason.data(), length);
    h.reason[length] = 0;
    h.culprit.store(tessera::detail::culprit_of(reason));
    h.abort_state.store(2);
  }
  for (int r = 0; r < layout_.ranks; r++) ring(r);
}

std::string Region::abort_reason() {
  for (int i = 0; i < 1000; i++) {
    if (header().abort_state.load(std::memory_order_acquire) == 2) {
      const std::string reason = header().reason;
      const int64_t culprit = header().culprit.load();
      if (culprit >= 0 && tessera::detail::culprit_of(reason) < 0) tessera::detail::note_culprit(culprit, reason);
      return reason;
    }
    sched_yield();  // the reason is being written; its writer may have died meanwhile
  }
  return "a peer failed";
}

}  // namespace tessera::comm::region
