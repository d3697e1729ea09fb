#include "tessera/comm/detail/region/exchange.h"

#include "tessera/base/error.h"
#include "tessera/base/error_file.h"
#include "tessera/comm/detail/odd_rank_out.h"
#include "tessera/comm/detail/records.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <cstring>

namespace tessera::comm::region {
namespace {

// Slot data: the length of each input, then the inputs, each aligned to a cache line.
int64_t* lengths(char* data) { return reinterpret_cast<int64_t*>(data); }
int64_t offset_of(const int64_t* lengths, size_t inputs, size_t input) {
  int64_t offset = round_up_to_line(static_cast<int64_t>(8 * inputs));
  for (size_t p = 0; p < input; p++) offset += round_up_to_line(lengths[p]);
  return offset;
}

}  // namespace

void copy_out(const Bytes& from, int64_t begin, int64_t size, char* to) {
  for_each_span(from, begin, size, [&](const char* span, int64_t n) {
    std::memcpy(to, span, static_cast<size_t>(n));
    to += n;
  });
}

void copy_in(const Bytes& to, int64_t begin, int64_t size, const char* from) {
  for_each_span(to, begin, size, [&](char* span, int64_t n) {
    if (span) std::memcpy(span, from, static_cast<size_t>(n));
    from += n;
  });
}

Exchange::Exchange(std::shared_ptr<Region> region, int rank, GroupInfo group, Options options)
    : region_(std::move(region)),
      rank_(rank),
      size_(region_->layout().ranks),
      group_(std::move(group)),
      timeout_(options.timeout),
      spins_(options.spin ? 1 : 0) {
  p2p_bytes_sent_.resize(static_cast<size_t>(size_));
  recvs_posted_.resize(static_cast<size_t>(size_));
  recvs_completed_.resize(static_cast<size_t>(size_));
}

std::string Exchange::name_of(int rank) const { return c10::str("rank ", group_.ranks[static_cast<size_t>(rank)]); }

void Exchange::fail(const std::string& why, int culprit) {
  if (culprit >= 0) tessera::detail::note_culprit(group_.ranks[static_cast<size_t>(culprit)], why);
  region_->abort(why);
  failure_ = why;
  const auto fail_operation = [&](const OperationPtr& op) {
    op->error = with_context(op->transfer.fingerprint, why);
    op->transfer = {};
    if (op->future) futures_to_complete_.push_back(op);
    op->done.store(true, std::memory_order_release);
  };
  std::for_each(collectives_.begin(), collectives_.end(), fail_operation);
  std::for_each(messages_.begin(), messages_.end(), fail_operation);
  collectives_.clear();
  messages_.clear();
}

void Exchange::fail_with_abort_reason() { fail(region_->abort_reason()); }

// Adds the operation and the group to an error message, unless the message already contains the operation.
std::string Exchange::with_context(const CollectiveFingerprint& fingerprint, const std::string& why) const {
  const std::string operation = describe(fingerprint);
  if (why.find(operation) != std::string::npos) return why;
  return c10::str(name_of(rank_), ", ", operation, " on group '", group_.group, "' (ranks ",
                  c10::Join(",", group_.ranks), "): ", why);
}

void Exchange::check_not_failed(const CollectiveFingerprint& posted) {
  if (C10_UNLIKELY(!failure_.empty())) TESSERA_FAIL(CommError, with_context(posted, failure_));
  if (C10_UNLIKELY(region_->aborted())) TESSERA_FAIL(CommError, with_context(posted, region_->abort_reason()));
}

OperationPtr Exchange::post(Transfer transfer) {
  auto op = c10::make_intrusive<Operation>();
  op->transfer = std::move(transfer);
  Lock lock(mutex_);
  check_not_failed(op->transfer.fingerprint);
  // A slot is free once this rank has completed the collective that used it before, and all peers have consumed it.
  // post() waits for that, so a posted collective is always visible to the peers. The collective gets its number after
  // the wait, because a callback of a future may post in the meantime.
  const auto awaited_rank = [&] {
    if (!failure_.empty() || posted_ < kRing) return -1;
    if (!collectives_.empty() && collectives_.front()->number + kRing <= posted_)
      return collectives_.front()->awaited_rank;
    const int index = static_cast<int>(posted_ % kRing);
    for (int r = 0; r < size_; r++)
      if (region_->slot(r, index).consumed.load(std::memory_order_acquire) < posted_ / kRing) return r;
    return -1;
  };
  if (awaited_rank() >= 0 && !progress_until(lock, awaited_rank, Clock::now() + timeout())) {
    const int late = awaited_rank();
    fail(c10::str(timeout_message(*op, late, timeout()), ": it is ", kRing, " collectives behind"), late);
  }
  check_not_failed(op->transfer.fingerprint);
  op->number = posted_++;
  put_into_slot(*op);
  collectives_.push_back(op);
  mark_active();
  advance_all();
  complete_futures(lock);
  return op;
}

void Exchange::put_into_slot(Operation& op) {
  Transfer& t = op.transfer;
  const int index = static_cast<int>(op.number % kRing);
  Slot& slot = region_->slot(rank_, index);
  char* data = region_->slot_data(rank_, index);
  int64_t longest = 0;
  for (size_t p = 0; p < t.inputs.size(); p++) {
    lengths(data)[p] = t.inputs[p].size;
    longest = std::max(longest, t.inputs[p].size);
  }
  if (offset_of(lengths(data), t.inputs.size(), t.inputs.size()) > region_->layout().slot_bytes) {
    const int64_t chunk = chunk_bytes(t);
    op.chunks = static_cast<uint64_t>((longest + chunk - 1) / chunk);
  } else {
    for (size_t p = 0; p < t.inputs.size(); p++)
      copy_out(t.inputs[p], 0, t.inputs[p].size, data + offset_of(lengths(data), t.inputs.size(), p));
  }
  t.fingerprint.chunks = op.chunks;
  slot.fingerprint = t.fingerprint;
  slot.published.store(op.number / kRing + 1, std::memory_order_release);
  region_->ring(rank_);
}

int64_t Exchange::input_bytes(const Operation& op, int r) {
  const int index = static_cast<int>(op.number % kRing);
  return lengths(region_->slot_data(r, index))[op.transfer.per_rank_inputs ? rank_ : 0];
}

// Rank r must have posted the same collective, with an input of the size that this rank expects.
std::string Exchange::difference_from(const Operation& op, int r) {
  const Transfer& t = op.transfer;
  const CollectiveFingerprint& mine = t.fingerprint;
  const CollectiveFingerprint& theirs = region_->slot(r, static_cast<int>(op.number % kRing)).fingerprint;
  if (std::string text =
          difference(mine, theirs, group_.ranks[static_cast<size_t>(rank_)], group_.ranks[static_cast<size_t>(r)]);
      !text.empty())
    return text;
  const size_t from = static_cast<size_t>(r);
  const int64_t expected =
      t.reduced ? (t.per_rank_inputs ? t.inputs[static_cast<size_t>(rank_)] : t.inputs[0]).size : t.outputs[from].size;
  const bool needed = t.reduced || t.outputs[from].data != nullptr || expected > 0;
  if (!needed || input_bytes(op, r) == expected) return "";
  return c10::str(name_of(rank_), " expects ", expected, " bytes from ", name_of(r), ", which posted ",
                  input_bytes(op, r), " in ", describe(mine));
}

bool Exchange::check_peers(const Operation& op) {
  for (int r = 0; r < size_; r++)
    if (r != rank_ && C10_UNLIKELY(!difference_from(op, r).empty())) {
      fail_with_difference(op, r);
      return false;
    }
  return true;
}

// If most ranks agree, the error says which one does not. `r` is the first rank that this one disagrees with.
void Exchange::fail_with_difference(const Operation& op, int r) {
  const int index = static_cast<int>(op.number % kRing);
  int odd = odd_rank_out(size_, [&](int a, int b) {
    return difference(region_->slot(a, index).fingerprint, region_->slot(b, index).fingerprint, a, b).empty() &&
           input_bytes(op, a) == input_bytes(op, b);
  });
  // Inputs of an all_to_all differ rightly. So the odd rank must be one that this rank disagrees with.
  if (odd >= 0 && odd != rank_ && difference_from(op, odd).empty()) odd = -1;
  const std::string text = difference_from(op, odd >= 0 && odd != rank_ ? odd : r);
  const std::string blame = odd >= 0 ? c10::str(name_of(odd), " differs from most ranks: ") : "";
  fail(c10::str("ranks disagree on group '", group_.group, "': ", blame, text), odd);
}

// True once all peers have published the collective and their fingerprints match.
bool Exchange::read_fingerprints(Operation& op) {
  const int index = static_cast<int>(op.number % kRing);
  for (int r = 0; r < size_; r++)
    if (region_->slot(r, index).published.load(std::memory_order_acquire) <= op.number / kRing) {
      op.awaited_rank = r;
      return false;
    }
  if (!check_peers(op)) return false;
  op.chunked.assign(static_cast<size_t>(size_), false);
  for (int r = 0; r < size_; r++) {
    const CollectiveFingerprint& theirs = region_->slot(r, index).fingerprint;
    op.chunked[static_cast<size_t>(r)] = theirs.chunks > 0;
    op.chunks = std::max(op.chunks, theirs.chunks);
  }
  op.fingerprints_known = true;
  read_slots(op);
  region_->slot(rank_, index).consumed.store(op.number / kRing + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

void Exchange::read_slots(Operation& op) {
  const Transfer& t = op.transfer;
  const int index = static_cast<int>(op.number % kRing);
  const size_t inputs = t.inputs.size(), mine = t.per_rank_inputs ? static_cast<size_t>(rank_) : 0;
  const auto input_of = [&](int r) {
    char* data = region_->slot_data(r, index);
    return data + offset_of(lengths(data), inputs, mine);
  };
  if (t.reduced) {
    if (op.chunks > 0 || !t.outputs[0].data) return;
    const auto dtype = static_cast<c10::ScalarType>(t.fingerprint.dtype);
    c10::SmallVector<const char*, 16> ins;
    for (int r = 0; r < size_; r++) ins.push_back(input_of(r));
    reduce(static_cast<WireOp>(t.fingerprint.reduce_op), dtype, t.outputs[0].data, {ins.data(), ins.size()},
           t.outputs[0].size / static_cast<int64_t>(c10::elementSize(dtype)));
    return;
  }
  for (int r = 0; r < size_; r++) {
    const Bytes& output = t.outputs[static_cast<size_t>(r)];
    if (!output.data || output.size == 0) continue;
    if (!op.chunked[static_cast<size_t>(r)])
      copy_in(output, 0, output.size, input_of(r));
    else if (r == rank_ && t.inputs[mine].data != output.data)  // a rank copies its own input directly
      copy_in(output, 0, output.size, t.inputs[mine].data);
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
    if (advance_p2p(*op)) {
      std::erase(messages_, op);
      complete(*op);
    } else {
      i++;
    }
  }
}

// Called for the oldest collective only: its chunks precede those of all later ones.
bool Exchange::advance(Operation& op) {
  if (!op.fingerprints_known) {
    while (op.written < op.chunks && write_chunk(op)) {
    }
    if (!read_fingerprints(op)) return false;
  }
  return op.chunks == 0 || exchange_chunks(op);
}

void Exchange::complete(Operation& op) {
  if (op.transfer.finish) try {
      at::AutoDispatchBelowADInplaceOrView below_autograd;
      op.transfer.finish();
    } catch (const c10::Error& error) {
      op.error = with_context(op.transfer.fingerprint, error.what_without_backtrace());
    } catch (const std::exception& error) {
      op.error = with_context(op.transfer.fingerprint, error.what());
    }
  chunks_completed_ += op.peer < 0 ? op.chunks : 0;
  op.transfer = {};
  if (op.future) futures_to_complete_.push_back(OperationPtr::unsafe_reclaim_from_nonowning(&op));
  op.done.store(true, std::memory_order_release);
}

}  // namespace tessera::comm::region
