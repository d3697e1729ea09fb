#include "tessera/comm/detail/region/exchange.h"

#include "tessera/base/error.h"
#include "tessera/comm/detail/records.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>

namespace tessera::comm::region {
namespace {

int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// In the data of a slot:  one length for each give, then the gives themselves, each on a line of its own.
int64_t* lengths(char* data) { return reinterpret_cast<int64_t*>(data); }
int64_t place_of(const int64_t* lengths, size_t gives, size_t give) {
  int64_t place = whole_lines(static_cast<int64_t>(8 * gives));
  for (size_t p = 0; p < give; p++) place += whole_lines(lengths[p]);
  return place;
}

}  // namespace

void copy_out(const Bytes& from, int64_t begin, int64_t size, char* to) {
  for_each_piece(from, begin, size, [&](const char* piece, int64_t n) {
    std::memcpy(to, piece, static_cast<size_t>(n));
    to += n;
  });
}

void copy_in(const Bytes& to, int64_t begin, int64_t size, const char* from) {
  for_each_piece(to, begin, size, [&](char* piece, int64_t n) {
    if (piece) std::memcpy(piece, from, static_cast<size_t>(n));
    from += n;
  });
}

Exchange::Exchange(std::shared_ptr<Region> region, int rank, Names names, Options options)
    : region_(std::move(region)),
      rank_(rank),
      size_(region_->layout().ranks),
      names_(std::move(names)),
      timeout_(options.timeout),
      spins_(options.spin ? 1 : 0) {
  mail_sent_.resize(static_cast<size_t>(size_));
  mail_asked_.resize(static_cast<size_t>(size_));
  mail_served_.resize(static_cast<size_t>(size_));
}

std::string Exchange::name_of(int rank) const { return c10::str("rank ", names_.ranks[static_cast<size_t>(rank)]); }

void Exchange::fail(const std::string& why) {
  region_->poison(why);
  failure_ = why;
  const auto give_up = [&](const OperationPtr& op) {
    op->error = in(op->transfer.stamp, why);
    op->transfer = {};
    if (op->future) handing_out_.push_back(op);
    op->done.store(true, std::memory_order_release);
  };
  std::for_each(collectives_.begin(), collectives_.end(), give_up);
  std::for_each(messages_.begin(), messages_.end(), give_up);
  collectives_.clear();
  messages_.clear();
}

void Exchange::fail_as_told() { fail(region_->poison_reason()); }

// Why an operation failed, and which one it was, unless the reason says that already.
std::string Exchange::in(const Stamp& stamp, const std::string& why) const {
  const std::string operation = describe(stamp);
  if (why.find(operation) != std::string::npos) return why;
  return c10::str(name_of(rank_), ", ", operation, " on group '", names_.group, "' (ranks ",
                  c10::Join(",", names_.ranks), "): ", why);
}

void Exchange::check_sound(const Stamp& posting) {
  if (C10_UNLIKELY(!failure_.empty())) TESSERA_FAIL(CommError, in(posting, failure_));
  if (C10_UNLIKELY(region_->poisoned())) TESSERA_FAIL(CommError, in(posting, region_->poison_reason()));
}

OperationPtr Exchange::post(Transfer transfer) {
  auto op = c10::make_intrusive<Operation>();
  op->transfer = std::move(transfer);
  Lock lock(mutex_);
  check_sound(op->transfer.stamp);
  // A slot is free once this rank has completed the collective that used it before, and all peers have departed from
  // it. Waiting for that here makes a posted collective visible to the peers. The number is taken only then, because a
  // callback of a future may post meanwhile.
  const auto missing = [&] {
    if (!failure_.empty() || posted_ < kRing) return -1;
    if (!collectives_.empty() && collectives_.front()->number + kRing <= posted_) return collectives_.front()->missing;
    const int place = static_cast<int>(posted_ % kRing);
    for (int r = 0; r < size_; r++)
      if (region_->slot(r, place).departed.load(std::memory_order_acquire) < posted_ / kRing) return r;
    return -1;
  };
  if (missing() >= 0 && !drive(lock, missing, Clock::now() + timeout()))
    fail(c10::str(late(*op, missing(), timeout()), ": it is ", kRing, " collectives behind"));
  check_sound(op->transfer.stamp);
  op->number = posted_++;
  put_into_slot(*op);
  collectives_.push_back(op);
  enlist();
  advance_all();
  hand_out_futures(lock);
  return op;
}

void Exchange::put_into_slot(Operation& op) {
  Transfer& t = op.transfer;
  const int place = static_cast<int>(op.number % kRing);
  Slot& slot = region_->slot(rank_, place);
  char* data = region_->slot_data(rank_, place);
  int64_t longest = 0;
  for (size_t p = 0; p < t.gives.size(); p++) {
    lengths(data)[p] = t.gives[p].size;
    longest = std::max(longest, t.gives[p].size);
  }
  if (place_of(lengths(data), t.gives.size(), t.gives.size()) > region_->layout().slot_bytes) {
    const int64_t chunk = chunk_bytes(t);
    op.chunks = static_cast<uint64_t>((longest + chunk - 1) / chunk);
  } else {
    for (size_t p = 0; p < t.gives.size(); p++)
      copy_out(t.gives[p], 0, t.gives[p].size, data + place_of(lengths(data), t.gives.size(), p));
  }
  t.stamp.chunks = op.chunks;
  slot.stamp = t.stamp;
  slot.published.store(op.number / kRing + 1, std::memory_order_release);
  region_->ring(rank_);
}

// What a rank gives is called for by its peers' sizes too: a rank that expects other bytes than it is given says so.
bool Exchange::agrees(const Operation& op, int r, const Stamp& theirs, int64_t given) {
  const Transfer& t = op.transfer;
  const Stamp& mine = t.stamp;
  if (const std::string text =
          difference(mine, theirs, names_.ranks[static_cast<size_t>(rank_)], names_.ranks[static_cast<size_t>(r)]);
      !text.empty()) {
    fail(c10::str("ranks disagree on group '", names_.group, "': ", text));
    return false;
  }
  const size_t from = static_cast<size_t>(r);
  const int64_t want =
      t.reduced ? (t.pieces ? t.gives[static_cast<size_t>(rank_)] : t.gives[0]).size : t.takes[from].size;
  const bool wanted = t.reduced || t.takes[from].data != nullptr || want > 0;
  if (wanted && given != want)
    fail(c10::str("ranks disagree on group '", names_.group, "' in ", describe(mine), ": ", name_of(rank_), " expects ",
                  want, " bytes from ", name_of(r), ", which posted ", given));
  return failure_.empty();
}

// True once every peer has said what it posted, and it is the same.
bool Exchange::read_stamps(Operation& op) {
  const int place = static_cast<int>(op.number % kRing);
  for (int r = 0; r < size_; r++)
    if (region_->slot(r, place).published.load(std::memory_order_acquire) <= op.number / kRing) {
      op.missing = r;
      return false;
    }
  op.streams.assign(static_cast<size_t>(size_), false);
  const size_t mine = op.transfer.pieces ? static_cast<size_t>(rank_) : 0;
  for (int r = 0; r < size_; r++) {
    const Stamp& theirs = region_->slot(r, place).stamp;
    if (r != rank_ && !agrees(op, r, theirs, lengths(region_->slot_data(r, place))[mine])) return false;
    op.streams[static_cast<size_t>(r)] = theirs.chunks > 0;
    op.chunks = std::max(op.chunks, theirs.chunks);
  }
  op.stamps_known = true;
  take_from_slots(op);
  region_->slot(rank_, place).departed.store(op.number / kRing + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

void Exchange::take_from_slots(Operation& op) {
  const Transfer& t = op.transfer;
  const int place = static_cast<int>(op.number % kRing);
  const size_t gives = t.gives.size(), mine = t.pieces ? static_cast<size_t>(rank_) : 0;
  const auto given_by = [&](int r) {
    char* data = region_->slot_data(r, place);
    return data + place_of(lengths(data), gives, mine);
  };
  if (t.reduced) {
    if (op.chunks > 0 || !t.takes[0].data) return;
    const auto dtype = static_cast<c10::ScalarType>(t.stamp.dtype);
    c10::SmallVector<const char*, 16> ins;
    for (int r = 0; r < size_; r++) ins.push_back(given_by(r));
    reduce(static_cast<WireOp>(t.stamp.reduce_op), dtype, t.takes[0].data, {ins.data(), ins.size()},
           t.takes[0].size / static_cast<int64_t>(c10::elementSize(dtype)));
    return;
  }
  for (int r = 0; r < size_; r++) {
    const Bytes& take = t.takes[static_cast<size_t>(r)];
    if (!take.data || take.size == 0) continue;
    if (!op.streams[static_cast<size_t>(r)])
      copy_in(take, 0, take.size, given_by(r));
    else if (r == rank_ && t.gives[mine].data != take.data)  // what a rank gives itself takes no detour
      copy_in(take, 0, take.size, t.gives[mine].data);
  }
}

void Exchange::advance_all() {
  while (!collectives_.empty()) {
    OperationPtr op = collectives_.front();
    if (!advance(*op)) break;
    collectives_.pop_front();
    complete(*op);
  }
  for (size_t i = 0; i < messages_.size();) {
    OperationPtr op = messages_[i];
    if (advance_mail(*op)) {
      std::erase(messages_, op);
      complete(*op);
    } else {
      i++;
    }
  }
}

// Only the oldest collective is advanced: its chunks come before those of all others.
bool Exchange::advance(Operation& op) {
  if (!op.stamps_known) {
    while (op.written < op.chunks && write_chunk(op)) {
    }
    if (!read_stamps(op)) return false;
  }
  return op.chunks == 0 || stream(op);
}

void Exchange::complete(Operation& op) {
  if (op.transfer.finish) try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.transfer.finish();
    } catch (const c10::Error& error) {
      op.error = in(op.transfer.stamp, error.what_without_backtrace());
    } catch (const std::exception& error) {
      op.error = in(op.transfer.stamp, error.what());
    }
  streamed_ += op.peer < 0 ? op.chunks : 0;
  op.transfer = {};
  if (op.future) handing_out_.push_back(OperationPtr::unsafe_reclaim_from_nonowning(&op));
  op.done.store(true, std::memory_order_release);
}

}  // namespace tessera::comm::region
