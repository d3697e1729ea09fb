#include "tessera/base/error.h"
#include "tessera/comm/region/exchange.h"

#include <algorithm>
#include <cstring>

// send and recv: one mailbox an ordered pair of ranks, two halves, messages in the order they were sent. The counts
// mean what they mean for slots, except that `departed` is written by the receiver.
namespace tessera::comm::region {

OperationPtr Exchange::post_send(Transfer transfer, int to) {
  check_sound();
  auto op = c10::make_intrusive<Operation>();
  const int64_t half = region_->layout().mail_bytes;
  op->transfer = std::move(transfer);
  op->peer = to;
  op->sends = true;
  op->base = mail_sent_[static_cast<size_t>(to)];
  op->chunks = static_cast<uint64_t>(std::max<int64_t>(1, (op->transfer.gives[0].size + half - 1) / half));
  op->transfer.stamp.chunks = op->chunks;
  mail_sent_[static_cast<size_t>(to)] += op->chunks;
  outstanding_.push_back(op);
  enlist();
  advance(*op);
  return op;
}

OperationPtr Exchange::post_recv(Transfer transfer, int from) {
  check_sound();
  auto op = c10::make_intrusive<Operation>();
  op->transfer = std::move(transfer);
  op->peer = from;
  op->ticket = mail_asked_[static_cast<size_t>(from)]++;
  outstanding_.push_back(op);
  enlist();
  advance(*op);
  return op;
}

bool Exchange::advance_mail(Operation& op) {
  const int64_t half = region_->layout().mail_bytes;
  op.missing = op.peer;
  if (op.sends) {
    Head& box = region_->mailbox(rank_, op.peer);
    // Not before the messages that were sent earlier, nor into a half that is still being read.
    while (op.sent < op.chunks && box.published.load(std::memory_order_relaxed) == op.base + op.sent) {
      const uint64_t departed = box.departed.load(std::memory_order_acquire);
      if (departed + kHalves <= op.base + op.sent) break;
      if (op.sent == 0) {
        if (departed < op.base) break;  // the stamp of the message before is still needed
        box.stamp = op.transfer.stamp;
        box.stamp.root = static_cast<int32_t>(op.transfer.gives[0].size & 0x7fffffff);
      }
      const int64_t from = static_cast<int64_t>(op.sent) * half, n = std::min(half, op.transfer.gives[0].size - from);
      if (n > 0)
        std::memcpy(region_->mail_half(rank_, op.peer, op.base + op.sent), op.transfer.gives[0].data + from,
                    static_cast<size_t>(n));
      op.sent++;
      box.published.store(op.base + op.sent, std::memory_order_release);
      region_->ring(rank_);
    }
    if (op.sent < op.chunks) return false;
    retire(op);
    return true;
  }
  if (mail_served_[static_cast<size_t>(op.peer)] != op.ticket) return false;
  Head& box = region_->mailbox(op.peer, rank_);
  Bytes& take = op.transfer.takes[0];
  if (op.got == 0) {
    op.base = box.departed.load(std::memory_order_relaxed);
    if (box.published.load(std::memory_order_acquire) <= op.base) return false;
    const Stamp& theirs = box.stamp;
    if (theirs.tag != op.transfer.stamp.tag || theirs.dtype != op.transfer.stamp.dtype ||
        theirs.root != static_cast<int32_t>(take.size & 0x7fffffff))
      fail(op,
           c10::str(name_of(rank_), " receives ", take.size, " bytes of ",
                    static_cast<c10::ScalarType>(op.transfer.stamp.dtype), " with tag ", op.transfer.stamp.tag,
                    " on group '", names_.group, "', but the next message of ", name_of(op.peer), " is ", theirs.root,
                    " bytes of ", static_cast<c10::ScalarType>(theirs.dtype), " with tag ", theirs.tag));
    op.chunks = theirs.chunks;
  }
  while (op.got < op.chunks && box.published.load(std::memory_order_acquire) > op.base + op.got) {
    const int64_t from = static_cast<int64_t>(op.got) * half, n = std::min(half, take.size - from);
    if (n > 0)
      std::memcpy(take.data + from, region_->mail_half(op.peer, rank_, op.base + op.got), static_cast<size_t>(n));
    op.got++;
    box.departed.store(op.base + op.got, std::memory_order_release);
    region_->ring(rank_);
  }
  if (op.got < op.chunks) return false;
  mail_served_[static_cast<size_t>(op.peer)]++;
  retire(op);
  return true;
}

}  // namespace tessera::comm::region
