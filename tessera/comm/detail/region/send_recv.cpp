#include "tessera/comm/detail/region/exchange.h"

#include <algorithm>
#include <cstring>

// send and recv: one channel per ordered pair of ranks. Messages keep the order in which they were sent. A send is
// complete when its bytes are in the ring of the channel. If they do not fit, the progress thread writes the rest as
// the receiver makes room, so a sender that computes for long delays nobody.
namespace tessera::comm::region {
namespace {

constexpr uint64_t kHeadBytes = sizeof(MessageHead);

// The bytes that a message takes in the ring.
uint64_t ring_bytes(int64_t message_bytes) {
  return kHeadBytes + static_cast<uint64_t>(round_up_to_line(message_bytes));
}

// The ring of a channel. Positions grow for ever; position p is at p % size.
struct ChannelRing {
  char* data;
  uint64_t size;

  // Bytes that are written or read before the other side hears of them. Both sides work on a large message at once.
  uint64_t part() const { return size / 4; }
  void write(uint64_t position, const void* from, uint64_t n) const {
    for_both_ends(position, n, [&](char* to, uint64_t begin, uint64_t count) {
      std::memcpy(to, static_cast<const char*>(from) + begin, count);
    });
  }
  void read(uint64_t position, void* to, uint64_t n) const {
    for_both_ends(position, n, [&](const char* from, uint64_t begin, uint64_t count) {
      std::memcpy(static_cast<char*>(to) + begin, from, count);
    });
  }

 private:
  // Calls f(memory, begin, count) for the part before the end of the ring, and for the part that starts at its begin.
  template <class F>
  void for_both_ends(uint64_t position, uint64_t n, F f) const {
    const uint64_t at = position % size, first = std::min(n, size - at);
    if (first > 0) f(data + at, uint64_t{0}, first);
    if (n > first) f(data, first, n - first);
  }
};

// The bytes of a message, without head and padding, in ring bytes [begin, end) of it.
struct PayloadRange {
  uint64_t begin, size;
};
PayloadRange payload_in(uint64_t begin, uint64_t end, int64_t message_bytes) {
  const auto clip = [&](uint64_t at) {
    return std::min(at - std::min(at, kHeadBytes), static_cast<uint64_t>(message_bytes));
  };
  return {clip(begin), clip(end) - clip(begin)};
}

}  // namespace

OperationPtr Exchange::post_send(Transfer transfer, int to) {
  auto op = c10::make_intrusive<Operation>();
  op->transfer = std::move(transfer);
  op->peer = op->awaited_rank = to;
  op->sends = true;
  op->length = ring_bytes(op->transfer.inputs[0].size);
  Lock lock(mutex_);
  check_not_failed(op->transfer.fingerprint);
  op->base = p2p_bytes_sent_[static_cast<size_t>(to)];
  p2p_bytes_sent_[static_cast<size_t>(to)] += op->length;
  messages_.push_back(op);
  mark_active();
  advance_all();
  if (!op->done.load(std::memory_order_relaxed)) want_progress();
  complete_futures(lock);
  return op;
}

OperationPtr Exchange::post_recv(Transfer transfer, int from) {
  auto op = c10::make_intrusive<Operation>();
  op->transfer = std::move(transfer);
  op->peer = op->awaited_rank = from;
  Lock lock(mutex_);
  check_not_failed(op->transfer.fingerprint);
  op->ticket = recvs_posted_[static_cast<size_t>(from)]++;
  messages_.push_back(op);
  mark_active();
  advance_all();
  complete_futures(lock);
  return op;
}

bool Exchange::advance_p2p(Operation& op) { return op.sends ? advance_send(op) : advance_recv(op); }

// A message waits for the messages sent before it, and for room in the ring.
bool Exchange::advance_send(Operation& op) {
  const Bytes& input = op.transfer.inputs[0];
  P2PChannel& channel = region_->channel(rank_, op.peer);
  const ChannelRing ring = {region_->channel_ring(rank_, op.peer),
                            static_cast<uint64_t>(region_->layout().channel_bytes)};
  while (op.moved < op.length) {
    const uint64_t position = channel.published.load(std::memory_order_relaxed);
    if (position != op.base + op.moved) return false;
    const uint64_t room = ring.size - (position - channel.consumed.load(std::memory_order_acquire));
    const uint64_t n = std::min({room, ring.part(), op.length - op.moved});
    if (n == 0 || (op.moved == 0 && n < kHeadBytes)) return false;
    if (op.moved == 0) {
      const MessageHead head{op.transfer.fingerprint, input.size};
      ring.write(position, &head, kHeadBytes);
    }
    const PayloadRange payload = payload_in(op.moved, op.moved + n, input.size);
    ring.write(op.base + kHeadBytes + payload.begin, input.data + payload.begin, payload.size);
    op.moved += n;
    channel.published.store(position + n, std::memory_order_release);
    region_->ring(rank_);
  }
  return true;
}

bool Exchange::advance_recv(Operation& op) {
  if (recvs_completed_[static_cast<size_t>(op.peer)] != op.ticket) return false;
  const Bytes& output = op.transfer.outputs[0];
  P2PChannel& channel = region_->channel(op.peer, rank_);
  const ChannelRing ring = {region_->channel_ring(op.peer, rank_),
                            static_cast<uint64_t>(region_->layout().channel_bytes)};
  while (op.length == 0 || op.moved < op.length) {
    const uint64_t position = channel.consumed.load(std::memory_order_relaxed);
    const uint64_t there = channel.published.load(std::memory_order_acquire) - position;
    if (there == 0) return false;
    if (op.length == 0) {  // a head is published in one part
      MessageHead head;
      ring.read(position, &head, kHeadBytes);
      const CollectiveFingerprint &theirs = head.fingerprint, &mine = op.transfer.fingerprint;
      if (theirs.tag != mine.tag || theirs.dtype != mine.dtype || head.bytes != output.size) {
        fail(c10::str(name_of(rank_), " receives ", output.size, " bytes of ", static_cast<c10::ScalarType>(mine.dtype),
                      " with tag ", mine.tag, " on group '", group_.group, "', but the next message of ",
                      name_of(op.peer), " is ", head.bytes, " bytes of ", static_cast<c10::ScalarType>(theirs.dtype),
                      " with tag ", theirs.tag));
        return false;
      }
      op.base = position;
      op.length = ring_bytes(head.bytes);
    }
    const uint64_t n = std::min({there, ring.part(), op.length - op.moved});
    const PayloadRange payload = payload_in(op.moved, op.moved + n, output.size);
    ring.read(op.base + kHeadBytes + payload.begin, output.data + payload.begin, payload.size);
    op.moved += n;
    channel.consumed.store(position + n, std::memory_order_release);
    region_->ring(rank_);
  }
  recvs_completed_[static_cast<size_t>(op.peer)]++;
  return true;
}

}  // namespace tessera::comm::region
