#include "tessera/comm/detail/region/exchange.h"

#include <algorithm>
#include <cstring>

// send and recv: one mailbox an ordered pair of ranks, two halves, messages in the order they were sent. The counts
// mean what they mean for slots, except that `departed` is written by the receiver.
namespace tessera::comm::region {

OperationPtr Exchange::post_send(Transfer transfer, int to) {
  auto op = c10::make_intrusive<Operation>();
  const int64_t half = region_->layout().mail_bytes;
  op->transfer = std::move(transfer);
  op->peer = to;
  op->sends = true;
  op->chunks = static_cast<uint64_t>(std::max<int64_t>(1, (op->transfer.gives[0].size + half - 1) / half));
  op->transfer.stamp.chunks = op->chunks;
  Lock lock(mutex_);
  check_sound(op->transfer.stamp);
  op->base = mail_sent_[static_cast<size_t>(to)];
  mail_sent_[static_cast<size_t>(to)] += op->chunks;
  messages_.push_back(op);
  enlist();
  advance_all();
  hand_out_futures(lock);
  return op;
}

OperationPtr Exchange::post_recv(Transfer transfer, int from) {
  auto op = c10::make_intrusive<Operation>();
  op->transfer = std::move(transfer);
  op->peer = from;
  Lock lock(mutex_);
  check_sound(op->transfer.stamp);
  op->ticket = mail_asked_[static_cast<size_t>(from)]++;
  messages_.push_back(op);
  enlist();
  advance_all();
  hand_out_futures(lock);
  return op;
}

bool Exchange::advance_mail(Operation& op) {
  op.missing = op.peer;
  return op.sends ? advance_send(op) : advance_recv(op);
}

// Not before the messages that were sent earlier, nor into a half that is still being read.
bool Exchange::advance_send(Operation& op) {
  const int64_t half = region_->layout().mail_bytes;
  const Bytes& give = op.transfer.gives[0];
  Mailbox& box = region_->mailbox(rank_, op.peer);
  while (op.written < op.chunks && box.published.load(std::memory_order_relaxed) == op.base + op.written) {
    const uint64_t departed = box.departed.load(std::memory_order_acquire);
    if (departed + kMailHalves <= op.base + op.written) break;
    if (op.written == 0) {
      if (departed < op.base) break;  // the stamp of the message before is still needed
      box.stamp = op.transfer.stamp;
      box.bytes = give.size;
    }
    const int64_t from = static_cast<int64_t>(op.written) * half, n = std::min(half, give.size - from);
    if (n > 0)
      std::memcpy(region_->mail_half(rank_, op.peer, op.base + op.written), give.data + from, static_cast<size_t>(n));
    op.written++;
    box.published.store(op.base + op.written, std::memory_order_release);
    region_->ring(rank_);
  }
  return op.written == op.chunks;
}

bool Exchange::advance_recv(Operation& op) {
  if (mail_served_[static_cast<size_t>(op.peer)] != op.ticket) return false;
  const int64_t half = region_->layout().mail_bytes;
  Mailbox& box = region_->mailbox(op.peer, rank_);
  const Bytes& take = op.transfer.takes[0];
  if (op.taken == 0) {
    op.base = box.departed.load(std::memory_order_relaxed);
    if (box.published.load(std::memory_order_acquire) <= op.base) return false;
    const Stamp &theirs = box.stamp, &mine = op.transfer.stamp;
    if (theirs.tag != mine.tag || theirs.dtype != mine.dtype || box.bytes != take.size) {
      fail(c10::str(name_of(rank_), " receives ", take.size, " bytes of ", static_cast<c10::ScalarType>(mine.dtype),
                    " with tag ", mine.tag, " on group '", names_.group, "', but the next message of ",
                    name_of(op.peer), " is ", box.bytes, " bytes of ", static_cast<c10::ScalarType>(theirs.dtype),
                    " with tag ", theirs.tag));
      return false;
    }
    op.chunks = theirs.chunks;
  }
  while (op.taken < op.chunks && box.published.load(std::memory_order_acquire) > op.base + op.taken) {
    const int64_t from = static_cast<int64_t>(op.taken) * half, n = std::min(half, take.size - from);
    if (n > 0)
      std::memcpy(take.data + from, region_->mail_half(op.peer, rank_, op.base + op.taken), static_cast<size_t>(n));
    op.taken++;
    box.departed.store(op.base + op.taken, std::memory_order_release);
    region_->ring(rank_);
  }
  if (op.taken < op.chunks) return false;
  mail_served_[static_cast<size_t>(op.peer)]++;
  return true;
}

}  // namespace tessera::comm::region
