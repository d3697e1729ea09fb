#include "tessera/comm/detail/region/exchange.h"

#include <algorithm>
#include <cstring>

// Collectives too large for a slot. They travel in chunks of one stage, several of which are under way at a time.
//
//   gathers    write i: put chunk i into the own stage        take i: copy it from every peer's stage
//   pieces     the same; a stage then holds one piece for each rank
//   all_reduce write i;  reduce i: sum segment `rank` of the chunk over all stages, in place;  take i: copy the other
//              segments from those who summed them.      reduce_scatter then all_gather = all_reduce
//
// A stage is free for chunk i once every rank has taken chunk i - kStages. What a rank gives to itself does not pass
// through its stage.
namespace tessera::comm::region {
namespace {

int64_t whole_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
// Segment r of n in a chunk of so many bytes. The last ones may be shorter, or empty.
Range segment(int64_t bytes, int r, int n) {
  const int64_t each = whole_lines((bytes + n - 1) / n);
  return {std::min(bytes, each * r), std::min(bytes, each * (r + 1))};
}
// Chunk i of a tensor of so many bytes.
Range chunk_of(int64_t bytes, uint64_t i, int64_t chunk) {
  const int64_t begin = std::min(bytes, static_cast<int64_t>(i) * chunk);
  return {begin, std::min(bytes, begin + chunk)};
}

void copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

bool in_segments(const Transfer& t) { return t.reduced && !t.pieces; }

}  // namespace

// Of one give in one chunk.
int64_t Exchange::chunk_bytes(const Transfer& t) const {
  const int64_t stage = region_->layout().stage_bytes;
  return t.pieces ? stage / size_ / 64 * 64 : stage;
}

// True if some rank has not come that far. The first step that finds one names the rank to wait for: the steps of a
// chunk are tried last to first, so what it waits for cannot depend on what this rank has yet to do.
bool Exchange::behind(Operation& op, std::atomic<uint64_t> Stream::*count, uint64_t wanted) {
  for (int r = 0; r < size_; r++)
    if ((region_->stream(r).*count).load(std::memory_order_acquire) < wanted) {
      if (op.missing < 0) op.missing = r;
      return true;
    }
  return false;
}

bool Exchange::stream(Operation& op) {
  for (bool moved = true; moved;) {
    op.missing = -1;
    moved = take_chunk(op);
    if (op.taken == op.chunks) return true;
    moved |= reduce_chunk(op);
    moved |= write_chunk(op);
  }
  return false;
}

bool Exchange::write_chunk(Operation& op) {
  if (op.written == op.chunks) return false;
  const uint64_t at = streamed_ + op.written;
  if (at >= kStages && behind(op, &Stream::read, at - kStages + 1)) return false;
  const Transfer& t = op.transfer;
  char* stage = region_->stage(rank_, at);
  const int64_t chunk = chunk_bytes(t);
  if (t.stamp.chunks == 0) {
    // All of it was in the slot; a peer has more.
  } else if (in_segments(t)) {
    const Range range = chunk_of(t.gives[0].size, op.written, chunk), own = segment(range.size(), rank_, size_);
    const char* from = t.gives[0].data + range.begin;
    copy(stage, from, own.begin);
    copy(stage + own.end, from + own.end, range.size() - own.end);
  } else {
    for (size_t p = 0; p < t.gives.size(); p++) {
      const Range range = chunk_of(t.gives[p].size, op.written, chunk);
      if (!t.pieces || static_cast<int>(p) != rank_)
        copy_out(t.gives[p], range.begin, range.size(), stage + static_cast<int64_t>(p) * chunk);
    }
  }
  op.written++;
  region_->stream(rank_).written.store(at + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

bool Exchange::reduce_chunk(Operation& op) {
  const Transfer& t = op.transfer;
  if (!in_segments(t) || op.reduced == op.written) return false;
  const uint64_t at = streamed_ + op.reduced;
  if (behind(op, &Stream::written, at + 1)) return false;
  const Range range = chunk_of(t.gives[0].size, op.reduced, chunk_bytes(t)), own = segment(range.size(), rank_, size_);
  const auto dtype = static_cast<c10::ScalarType>(t.stamp.dtype);
  c10::SmallVector<const char*, 16> ins;
  for (int r = 0; r < size_; r++)
    ins.push_back(r == rank_ ? t.gives[0].data + range.begin + own.begin : region_->stage(r, at) + own.begin);
  char* staged = region_->stage(rank_, at) + own.begin;
  char* sum = t.takes[0].data ? t.takes[0].data + range.begin + own.begin : staged;
  reduce(static_cast<WireOp>(t.stamp.reduce_op), dtype, sum, {ins.data(), ins.size()},
         own.size() / static_cast<int64_t>(c10::elementSize(dtype)));
  if (sum != staged) copy(staged, sum, own.size());
  op.reduced++;
  region_->stream(rank_).reduced.store(at + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

bool Exchange::take_chunk(Operation& op) {
  const Transfer& t = op.transfer;
  if (op.taken == (in_segments(t) ? op.reduced : op.written)) return false;
  const uint64_t at = streamed_ + op.taken;
  if (behind(op, in_segments(t) ? &Stream::reduced : &Stream::written, at + 1)) return false;
  const int64_t chunk = chunk_bytes(t);
  const int64_t mine = t.pieces ? rank_ * chunk : 0;
  if (in_segments(t)) {
    const Range range = chunk_of(t.takes[0].size, op.taken, chunk);
    for (int r = 0; r < size_ && t.takes[0].data; r++) {
      const Range theirs = segment(range.size(), r, size_);
      if (r != rank_)
        copy(t.takes[0].data + range.begin + theirs.begin, region_->stage(r, at) + theirs.begin, theirs.size());
    }
  } else if (t.reduced) {
    const Range range = chunk_of(t.takes[0].size, op.taken, chunk);
    const auto dtype = static_cast<c10::ScalarType>(t.stamp.dtype);
    const auto element = static_cast<int64_t>(c10::elementSize(dtype));
    int64_t done = 0;
    for_each_piece(t.gives[static_cast<size_t>(rank_)], range.begin, range.size(), [&](const char* own, int64_t n) {
      c10::SmallVector<const char*, 16> ins;
      for (int r = 0; r < size_; r++) ins.push_back(r == rank_ ? own : region_->stage(r, at) + mine + done);
      reduce(static_cast<WireOp>(t.stamp.reduce_op), dtype, t.takes[0].data + range.begin + done,
             {ins.data(), ins.size()}, n / element);
      done += n;
    });
  } else {
    for (int r = 0; r < size_; r++) {
      const Bytes& take = t.takes[static_cast<size_t>(r)];
      if (r == rank_ || !take.data || !op.streams[static_cast<size_t>(r)]) continue;
      const Range range = chunk_of(take.size, op.taken, chunk);
      copy_in(take, range.begin, range.size(), region_->stage(r, at) + mine);
    }
  }
  op.taken++;
  region_->stream(rank_).read.store(at + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

}  // namespace tessera::comm::region
