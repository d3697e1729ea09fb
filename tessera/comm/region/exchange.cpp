#include "tessera/comm/region/exchange.h"

#include "tessera/base/error.h"
#include "tessera/comm/records.h"

#include <algorithm>
#include <cstring>
#include <thread>

namespace tessera::comm::region {
namespace {

using Clock = std::chrono::steady_clock;

// The exchanges of this thread that have something under way. A rank that waits in one group still moves the large
// transfers it has posted in others: their peers may be waiting for it.
thread_local std::vector<Exchange*> busy;

constexpr auto kHelpEvery = std::chrono::microseconds(200);

int64_t round_down(int64_t bytes) { return bytes / 64 * 64; }

// Announced before the condition is tested for the last time, so that no ring is lost between test and sleep.
class Sleeper {
 public:
  Sleeper(Region& region, int rank) : region_(region), rank_(rank) {
    region_.bell(rank_).sleepers.fetch_add(1);
    rung_ = region_.bell(rank_).rung.load();
  }
  ~Sleeper() { region_.bell(rank_).sleepers.fetch_sub(1); }
  void sleep(Clock::time_point until) { region_.sleep(rank_, rung_, until); }

 private:
  Region& region_;
  int rank_;
  uint32_t rung_;
};

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

Exchange::Exchange(std::shared_ptr<Region> region, int rank, Names names, std::chrono::milliseconds timeout)
    : region_(std::move(region)),
      rank_(rank),
      size_(region_->layout().ranks),
      names_(std::move(names)),
      timeout_(timeout) {
  // Spinning only helps when every rank has a core; otherwise it keeps the awaited one from running.
  spins_ = static_cast<int>(std::thread::hardware_concurrency()) >= size_ ? 1000 : 0;
  mail_sent_.resize(static_cast<size_t>(size_));
  mail_asked_.resize(static_cast<size_t>(size_));
  mail_served_.resize(static_cast<size_t>(size_));
}

Exchange::~Exchange() { std::erase(busy, this); }

std::string Exchange::name_of(int rank) const { return c10::str("rank ", names_.ranks[static_cast<size_t>(rank)]); }

std::string Exchange::describe(const Stamp& s) const {
  std::string text = c10::str(kind_name(static_cast<Kind>(s.kind), static_cast<Family>(s.family)), " #", s.sequence);
  if (s.tensor_name[0]) text += c10::str(" ('", s.tensor_name, "')");
  if (s.dtype != static_cast<uint8_t>(c10::ScalarType::Undefined))
    text += c10::str(" of ", static_cast<c10::ScalarType>(s.dtype));
  return text;
}

// Also poisons the group: peers would only wait for this rank in vain.
void Exchange::fail(Operation& op, const std::string& why) {
  op.error = why;
  region_->poison(why);
  retire(op);
  TESSERA_FAIL(CommError, why);
}

void Exchange::poison(const std::string& reason) { region_->poison(reason); }

// A half begins with the lengths of what this rank gives (8 bytes each), then the pieces of the chunk.
int64_t Exchange::piece_bytes(const Transfer& t) const {
  const int64_t room = region_->layout().half_bytes - 64 - 8 * size_;
  return round_down(t.pieces ? room / size_ : room);
}

void Exchange::check_sound() {
  if (C10_UNLIKELY(region_->poisoned())) TESSERA_FAIL(CommError, region_->poison_reason());
}

OperationPtr Exchange::post(Transfer transfer) {
  check_sound();
  auto op = c10::make_intrusive<Operation>();
  op->place = static_cast<int>(posted_ % kRing);
  if (auto& before = in_place_[op->place]; before && !before->done) wait(*before, timeout_);  // the ring is full
  op->transfer = std::move(transfer);
  op->base = place_chunks_[op->place];
  int64_t longest = 0;
  for (const Bytes& give : op->transfer.gives) longest = std::max(longest, give.size);
  const int64_t piece = piece_bytes(op->transfer);
  op->chunks = static_cast<uint64_t>(std::max<int64_t>(1, (longest + piece - 1) / piece));
  op->transfer.stamp.chunks = op->chunks;
  posted_++;
  in_place_[op->place] = op;
  outstanding_.push_back(op);
  enlist();
  // The peers may still be reading what was in this slot kRing collectives ago; they depart from it before they post
  // this one. Wait for that here, so that a posted collective is always visible to the peers.
  const auto deadline = Clock::now() + timeout_;
  while (!all_departed(*op)) {
    if (region_->poisoned()) fail(*op, region_->poison_reason());
    if (Clock::now() > deadline)
      fail(*op, c10::str(name_of(rank_), " waited ", static_cast<double>(timeout_.count()) / 1000.0, " s to post ",
                         describe(op->transfer.stamp), " on group '", names_.group, "': ", name_of(op->missing), " is ",
                         kRing, " collectives behind"));
    help_all(op.get());
    Sleeper sleeper(*region_, op->missing);
    if (!all_departed(*op) && !region_->poisoned()) sleeper.sleep(std::min(deadline, Clock::now() + kHelpEvery));
  }
  while (op->sent < std::min<uint64_t>(op->chunks, kHalves)) write_chunk(*op);
  return op;
}

// True once no peer reads what was in this slot before, so that its stamp may be overwritten.
bool Exchange::all_departed(Operation& op) {
  for (int r = 0; r < size_; r++)
    if (r != rank_ && region_->slot(r, op.place).departed.load(std::memory_order_acquire) < op.base) {
      op.missing = r;
      return false;
    }
  return true;
}

void Exchange::write_chunk(Operation& op) {
  const Transfer& t = op.transfer;
  Head& head = region_->slot(rank_, op.place);
  char* half = region_->slot_half(rank_, op.place, op.base + op.sent);
  const int64_t piece = piece_bytes(t), from = static_cast<int64_t>(op.sent) * piece;
  if (op.sent == 0) {
    head.stamp = t.stamp;
    auto* lengths = reinterpret_cast<int64_t*>(half);
    for (size_t p = 0; p < t.gives.size(); p++) lengths[p] = t.gives[p].size;
  }
  char* data = half + round_down(8 * size_ + 63);
  for (size_t p = 0; p < t.gives.size(); p++) {
    const int64_t n = std::min(piece, t.gives[p].size - from);
    if (n > 0) std::memcpy(data + static_cast<int64_t>(p) * piece, t.gives[p].data + from, static_cast<size_t>(n));
  }
  op.sent++;
  head.published.store(op.base + op.sent, std::memory_order_release);
  region_->ring(rank_);
}

// True once every peer has said what it posted; throws if it is another collective.
bool Exchange::read_stamps(Operation& op) {
  for (int r = 0; r < size_; r++)
    if (region_->slot(r, op.place).published.load(std::memory_order_acquire) <= op.base) {
      op.missing = r;
      return false;
    }
  const Transfer& t = op.transfer;
  const Stamp& mine = t.stamp;
  for (int r = 0; r < size_; r++) {
    if (r == rank_) continue;
    const Stamp theirs = region_->slot(r, op.place).stamp;
    if (theirs.kind != mine.kind || theirs.dtype != mine.dtype || theirs.reduce_op != mine.reduce_op ||
        theirs.root != mine.root || theirs.sequence != mine.sequence || theirs.tag != mine.tag)
      fail(op, c10::str("ranks disagree on group '", names_.group, "': ", name_of(rank_), " posted ", describe(mine),
                        mine.root >= 0 ? c10::str(" with root ", mine.root) : "", ", ", name_of(r), " posted ",
                        describe(theirs), theirs.root >= 0 ? c10::str(" with root ", theirs.root) : "",
                        theirs.kind == mine.kind && theirs.dtype == mine.dtype && theirs.root == mine.root
                            ? " with another reduction or number"
                            : ""));
    const auto* lengths = reinterpret_cast<const int64_t*>(region_->slot_half(r, op.place, op.base));
    const int64_t given = lengths[t.pieces ? rank_ : 0];
    const bool wanted = t.reduced ? t.takes[0].data != nullptr : t.takes[static_cast<size_t>(r)].data != nullptr;
    const int64_t want = t.reduced ? t.takes[0].size : t.takes[static_cast<size_t>(r)].size;
    if ((wanted || want > 0) && given != want)
      fail(op, c10::str("ranks disagree on group '", names_.group, "' in ", describe(mine), ": ", name_of(rank_),
                        " expects ", want, " bytes from ", name_of(r), ", which posted ", given));
    op.chunks = std::max(op.chunks, theirs.chunks);
  }
  op.stamps_known = true;
  return true;
}

void Exchange::read_chunk(Operation& op) {
  const Transfer& t = op.transfer;
  const int64_t piece = piece_bytes(t), from = static_cast<int64_t>(op.got) * piece;
  const int64_t offset = round_down(8 * size_ + 63) + (t.pieces ? rank_ * piece : 0);
  const auto data = [&](int r) { return region_->slot_half(r, op.place, op.base + op.got) + offset; };
  if (t.reduced) {
    const int64_t n = std::min(piece, t.takes[0].size - from);
    if (n <= 0 || !t.takes[0].data) return;
    const auto dtype = static_cast<c10::ScalarType>(t.stamp.dtype);
    c10::SmallVector<const char*, 16> ins;
    for (int r = 0; r < size_; r++) ins.push_back(data(r));
    reduce(static_cast<WireOp>(t.stamp.reduce_op), dtype, t.takes[0].data + from, {ins.data(), ins.size()},
           n / static_cast<int64_t>(c10::elementSize(dtype)));
    return;
  }
  for (int r = 0; r < size_; r++) {
    const Bytes& take = t.takes[static_cast<size_t>(r)];
    const int64_t n = std::min(piece, take.size - from);
    if (n > 0 && take.data) std::memcpy(take.data + from, data(r), static_cast<size_t>(n));
  }
}

// Does all that can be done without waiting. True when the collective is complete.
bool Exchange::advance(Operation& op) {
  if (op.done) return true;
  if (op.peer >= 0) return advance_mail(op);
  if (!op.stamps_known && !read_stamps(op)) return false;
  for (;;) {
    bool moved = false;
    while (op.sent < op.chunks) {  // a rank that has less to give than the longest publishes empty chunks
      bool free = true;
      for (int r = 0; r < size_ && free; r++)
        if (r != rank_ &&
            region_->slot(r, op.place).departed.load(std::memory_order_acquire) + kHalves <= op.base + op.sent) {
          op.missing = r;
          free = false;
        }
      if (!free || op.sent >= op.got + kHalves) break;  // the own half too: this rank reads it last
      write_chunk(op);
      moved = true;
    }
    bool readable = op.got < op.sent;
    for (int r = 0; r < size_ && readable; r++)
      if (region_->slot(r, op.place).published.load(std::memory_order_acquire) <= op.base + op.got) {
        op.missing = r;
        readable = false;
      }
    if (readable) {
      read_chunk(op);
      op.got++;
      region_->slot(rank_, op.place).departed.store(op.base + op.got, std::memory_order_release);
      region_->ring(rank_);
      if (op.got == op.chunks) {
        place_chunks_[op.place] = op.base + op.chunks;
        retire(op);
        return true;
      }
      moved = true;
    }
    if (!moved) return false;
  }
}

void Exchange::enlist() {
  if (outstanding_.size() == 1) busy.push_back(this);
}

void Exchange::retire(Operation& op) {
  op.done = true;
  op.transfer.keep.clear();
  if (in_place_[op.place].get() == &op && op.peer < 0) in_place_[op.place].reset();
  std::erase_if(outstanding_, [&](const OperationPtr& other) { return other.get() == &op; });
  if (outstanding_.empty()) std::erase(busy, this);
}

bool Exchange::help(const Operation* except) {
  bool any = false;
  for (size_t i = 0; i < outstanding_.size();) {
    OperationPtr op = outstanding_[i];
    if (op.get() == except || !needs_help(*op)) {
      i++;
      continue;
    }
    any = true;
    if (!advance(*op)) i++;  // complete: it left the list
  }
  return any;
}

bool Exchange::help_all(const Operation* except) {
  bool any = false;
  const auto exchanges = busy;  // help() may shorten it
  for (Exchange* exchange : exchanges) any |= exchange->help(except);
  return any;
}

bool Exchange::poll(Operation& op) { return !op.error.empty() || advance(op) || region_->poisoned(); }

void Exchange::wait(Operation& op, std::chrono::milliseconds timeout) {
  OperationPtr alive = OperationPtr::unsafe_reclaim_from_nonowning(&op);  // retire() lets go of it
  if (!op.error.empty()) TESSERA_FAIL(CommError, op.error);
  if (advance(op)) return;
  for (int i = 0; i < spins_; i++) {
    pause();
    if (advance(op)) return;
  }
  const auto deadline = Clock::now() + timeout;
  for (;;) {
    const bool helping = !busy.empty() && help_all(&op);
    if (advance(op)) return;
    const int missing = op.missing;
    Sleeper sleeper(*region_, missing);
    if (advance(op)) return;
    if (op.missing != missing) continue;
    if (region_->poisoned()) fail(op, region_->poison_reason());
    const auto now = Clock::now();
    if (now >= deadline)
      fail(op, c10::str(name_of(rank_), " waited ", static_cast<double>(timeout.count()) / 1000.0, " s for ",
                        name_of(missing), " in ", describe(op.transfer.stamp), " on group '", names_.group, "' (ranks ",
                        c10::Join(",", names_.ranks), "); it has not come"));
    sleeper.sleep(helping ? std::min(deadline, now + kHelpEvery) : deadline);
  }
}

}  // namespace tessera::comm::region
