#include "tessera/comm/detail/region/region.h"

#include "tessera/base/detail/settings.h"

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

size_t Layout::members() const { return sizeof(RegionHeader); }
size_t Layout::bells() const { return members() + count(ranks) * sizeof(Member); }
size_t Layout::slots() const { return bells() + count(ranks) * sizeof(Bell); }
size_t Layout::streams() const { return slots() + count(ranks * kRing) * sizeof(Slot); }
size_t Layout::mailboxes() const { return streams() + count(ranks) * sizeof(Stream); }
size_t Layout::slot_data() const { return mailboxes() + count(ranks * ranks) * sizeof(Mailbox); }
size_t Layout::stage_data() const { return slot_data() + count(ranks * kRing) * static_cast<size_t>(slot_bytes); }
size_t Layout::mail_data() const { return stage_data() + count(ranks * kStages) * static_cast<size_t>(stage_bytes); }
size_t Layout::total() const {
  return mail_data() + count(ranks * ranks * kMailHalves) * static_cast<size_t>(mail_bytes);
}

Layout Layout::of(int ranks) {
  const auto whole_lines = [](int64_t bytes) { return (bytes + 63) / 64 * 64; };
  Layout layout;
  layout.ranks = ranks;
  // The lengths of what a rank gives to each peer always fit into a slot, and a cache line for each into a stage.
  layout.slot_bytes = whole_lines(std::max<int64_t>(setting_int("TESSERA_SLOT_BYTES"), 64 + 8 * ranks));
  layout.stage_bytes = whole_lines(std::max<int64_t>(setting_int("TESSERA_STAGE_BYTES"), 64 * ranks));
  layout.mail_bytes = whole_lines(std::clamp<int64_t>((512 << 10) / ranks, 2 << 10, 32 << 10));
  return layout;
}

char* Region::slot_data(int rank, int place) {
  return base_ + layout_.slot_data() + count(rank * kRing + place) * static_cast<size_t>(layout_.slot_bytes);
}
char* Region::stage(int rank, uint64_t chunk) {
  const size_t place = count(rank * kStages) + chunk % kStages;
  return base_ + layout_.stage_data() + place * static_cast<size_t>(layout_.stage_bytes);
}
char* Region::mail_half(int from, int to, uint64_t chunk) {
  const size_t half = count((from * layout_.ranks + to) * kMailHalves) + chunk % kMailHalves;
  return base_ + layout_.mail_data() + half * static_cast<size_t>(layout_.mail_bytes);
}

// Sleeper: sleepers++, read rung, test the condition, sleep if rung is unchanged.   Ringer: change, rung++, read
// sleepers. All are sequentially consistent, so either the ringer sees the sleeper, or the sleeper sees the change.
void Region::ring(int rank) {
  Bell& b = bell(rank);
  b.rung.fetch_add(1);
  if (b.sleepers.load() != 0)
    syscall(SYS_futex, &b.rung, FUTEX_WAKE | (shared_ ? 0 : FUTEX_PRIVATE_FLAG), INT_MAX, nullptr, nullptr, 0);
}

void Region::sleep(int rank, uint32_t rung, std::chrono::steady_clock::time_point until) {
  const auto left =
      std::chrono::duration_cast<std::chrono::nanoseconds>(until - std::chrono::steady_clock::now()).count();
  if (left <= 0) return;
  timespec wait{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
  syscall(SYS_futex, &bell(rank).rung, FUTEX_WAIT | (shared_ ? 0 : FUTEX_PRIVATE_FLAG), rung, &wait, nullptr, 0);
}

void Region::leave(int rank, uint64_t collectives) {
  member(rank).collectives.store(collectives, std::memory_order_relaxed);
  member(rank).left.store(1);
  ring(rank);
}

void Region::poison(const std::string& reason) {
  RegionHeader& h = header();
  uint32_t sound = 0;
  if (h.poison.compare_exchange_strong(sound, 1)) {
    const size_t length = std::min(reason.size(), sizeof(h.reason) - 1);
    std::memcpy(h.reason, reason.data(), length);
    h.reason[length] = 0;
    h.poison.store(2);
  }
  for (int r = 0; r < layout_.ranks; r++) ring(r);
}

std::string Region::poison_reason() {
  for (int i = 0; i < 1000; i++) {
    if (header().poison.load(std::memory_order_acquire) == 2) return header().reason;
    sched_yield();  // being written; unless the writer died over it
  }
  return "a peer failed";
}

}  // namespace tessera::comm::region
