#include "tessera/comm/detail/region/exchange.h"

#include <algorithm>
#include <cstring>

// send and recv: one channel per ordered pair of ranks, with kChannelBuffers buffers. Messages keep the order in which
// they were sent. The counters mean the same as those of slots, except that the receiver writes `consumed`.
namespace tessera::comm::region {

OperationPtr Exchange::post_send(Transfer transfer, int to) {
  auto op = c10::make_intrusive<Operation>();
  const int64_t buffer_bytes = region_->layout().channel_bytes;
  op->transfer = std::move(transfer);
  op->peer = to;
  op->sends = true;
  op->chunks =
      static_cast<uint64_t>(std::max<int64_t>(1, (op->transfer.inputs[0].size + buffer_bytes - 1) / buffer_bytes));
  op->transfer.fingerprint.chunks = op->chunks;
  Lock lock(mutex_);
  check_not_failed(op->transfer.fingerprint);
  op->base = p2p_chunks_sent_[static_cast<size_t>(to)];
  p2p_chunks_sent_[static_cast<size_t>(to)] += op->chunks;
  messages_.push_back(op);
  mark_active();
  advance_all();
  complete_futures(lock);
  return op;
}

OperationPtr Exchange::post_recv(Transfer transfer, int from) {
  auto op = c10::make_intrusive<Operation>();
  op->transfer = std::move(transfer);
  op->peer = from;
  Lock lock(mutex_);
  check_not_failed(op->transfer.fingerprint);
  op->ticket = recvs_posted_[static_cast<size_t>(from)]++;
  messages_.push_back(op);
  mark_active();
  advance_all();
  complete_futures(lock);
  return op;
}

bool Exchange::advance_p2p(Operation& op) {
  op.awaited_rank = op.peer;
  return op.sends ? advance_send(op) : advance_recv(op);
}

// A message waits for the messages sent before it, and for a buffer that the receiver has consumed.
bool Exchange::advance_send(Operation& op) {
  const int64_t buffer_bytes = region_->layout().channel_bytes;
  const Bytes& input = op.transfer.inputs[0];
  P2PChannel& channel = region_->channel(rank_, op.peer);
  while (op.written < op.chunks && channel.published.load(std::memory_order_relaxed) == op.base + op.written) {
    const uint64_t consumed = channel.consumed.load(std::memory_order_acquire);
    if (consumed + kChannelBuffers <= op.base + op.written) break;
    if (op.written == 0) {
      if (consumed < op.base) break;  // the receiver still needs the fingerprint of the previous message
      channel.fingerprint = op.transfer.fingerprint;
      channel.bytes = input.size;
    }
    const int64_t from = static_cast<int64_t>(op.written) * buffer_bytes, n = std::min(buffer_bytes, input.size - from);
    if (n > 0)
      std::memcpy(region_->channel_buffer(rank_, op.peer, op.base + op.written), input.data + from,
                  static_cast<size_t>(n));
    op.written++;
    channel.published.store(op.base + op.written, std::memory_order_release);
    region_->ring(rank_);
  }
  return op.written == op.chunks;
}

bool Exchange::advance_recv(Operation& op) {
  if (recvs_completed_[static_cast<size_t>(op.peer)] != op.ticket) return false;
  const int64_t buffer_bytes = region_->layout().channel_bytes;
  P2PChannel& channel = region_->channel(op.peer, rank_);
  const Bytes& output = op.transfer.outputs[0];
  if (op.read == 0) {
    op.base = channel.consumed.load(std::memory_order_relaxed);
    if (channel.published.load(std::memory_order_acquire) <= op.base) return false;
    const CollectiveFingerprint &theirs = channel.fingerprint, &mine = op.transfer.fingerprint;
    if (theirs.tag != mine.tag || theirs.dtype != mine.dtype || channel.bytes != output.size) {
      fail(c10::str(name_of(rank_), " receives ", output.size, " bytes of ", static_cast<c10::ScalarType>(mine.dtype),
                    " with tag ", mine.tag, " on group '", group_.group, "', but the next message of ",
                    name_of(op.peer), " is ", channel.bytes, " bytes of ", static_cast<c10::ScalarType>(theirs.dtype),
                    " with tag ", theirs.tag));
      return false;
    }
    op.chunks = theirs.chunks;
  }
  while (op.read < op.chunks && channel.published.load(std::memory_order_acquire) > op.base + op.read) {
    const int64_t from = static_cast<int64_t>(op.read) * buffer_bytes, n = std::min(buffer_bytes, output.size - from);
    if (n > 0)
      std::memcpy(output.data + from, region_->channel_buffer(op.peer, rank_, op.base + op.read),
                  static_cast<size_t>(n));
    op.read++;
    channel.consumed.store(op.base + op.read, std::memory_order_release);
    region_->ring(rank_);
  }
  if (op.read < op.chunks) return false;
  recvs_completed_[static_cast<size_t>(op.peer)]++;
  return true;
}

}  // namespace tessera::comm::region
