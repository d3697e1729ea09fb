#include "tessera/comm/detail/region/exchange.h"

#include <algorithm>
#include <cstring>

// Collectives whose input is too large for a slot. The input is sent in chunks of one staging buffer each. Several
// chunks are in flight at a time.
//
//   all_gather       write i: copy chunk i into the own staging buffer
//                    read i:  copy it from the staging buffer of every peer
//   per-rank inputs  the same; a staging buffer then holds one part per rank
//   all_reduce       write i
//                    reduce i: reduce segment `rank` of the chunk over all staging buffers, in place
//                    read i:   copy the other segments from the ranks that reduced them
//                    law: all_gather(reduce_scatter(x)) = all_reduce(x)
//
// A staging buffer is free for chunk i once every rank has read chunk i - kStagingBuffers. What a rank sends to itself
// does not pass through its staging buffer.
namespace tessera::comm::region {
namespace {

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
// Segment r of n in a chunk of `bytes` bytes. The last segments may be shorter, or empty.
Range segment(int64_t bytes, int r, int n) {
  const int64_t each = round_up_to_line((bytes + n - 1) / n);
  return {std::min(bytes, each * r), std::min(bytes, each * (r + 1))};
}
// Chunk i of a tensor of `bytes` bytes.
Range chunk_of(int64_t bytes, uint64_t i, int64_t chunk) {
  const int64_t begin = std::min(bytes, static_cast<int64_t>(i) * chunk);
  return {begin, std::min(bytes, begin + chunk)};
}

void copy(char* to, const char* from, int64_t bytes) {
  if (bytes > 0) std::memcpy(to, from, static_cast<size_t>(bytes));
}

bool in_segments(const Transfer& t) { return t.reduced && !t.per_rank_inputs; }

}  // namespace

// The bytes of one input in one chunk.
int64_t Exchange::chunk_bytes(const Transfer& t) const {
  const int64_t buffer = region_->layout().staging_bytes;
  return t.per_rank_inputs ? buffer / size_ / 64 * 64 : buffer;
}

// True if the counter of some rank is below `wanted`. The first step that finds such a rank sets the awaited rank. The
// steps of a chunk are tried last to first, so the awaited rank never depends on work that this rank still has to do.
bool Exchange::any_behind(Operation& op, std::atomic<uint64_t> ChunkCounters::*counter, uint64_t wanted) {
  for (int r = 0; r < size_; r++)
    if ((region_->chunk_counters(r).*counter).load(std::memory_order_acquire) < wanted) {
      if (op.awaited_rank < 0) op.awaited_rank = r;
      return true;
    }
  return false;
}

bool Exchange::exchange_chunks(Operation& op) {
  for (bool moved = true; moved;) {
    op.awaited_rank = -1;
    moved = read_chunk(op);
    if (op.read == op.chunks) return true;
    moved |= reduce_chunk(op);
    moved |= write_chunk(op);
  }
  return false;
}

bool Exchange::write_chunk(Operation& op) {
  if (op.written == op.chunks) return false;
  const uint64_t at = chunks_completed_ + op.written;
  if (at >= kStagingBuffers && any_behind(op, &ChunkCounters::read, at - kStagingBuffers + 1)) return false;
  const Transfer& t = op.transfer;
  char* buffer = region_->staging_buffer(rank_, at);
  const int64_t chunk = chunk_bytes(t);
  if (t.fingerprint.chunks == 0) {
    // The input of this rank was in the slot; a peer has a larger one.
  } else if (in_segments(t)) {
    const Range range = chunk_of(t.inputs[0].size, op.written, chunk), own = segment(range.size(), rank_, size_);
    const char* from = t.inputs[0].data + range.begin;
    copy(buffer, from, own.begin);
    copy(buffer + own.end, from + own.end, range.size() - own.end);
  } else {
    for (size_t p = 0; p < t.inputs.size(); p++) {
      const Range range = chunk_of(t.inputs[p].size, op.written, chunk);
      if (!t.per_rank_inputs || static_cast<int>(p) != rank_)
        copy_out(t.inputs[p], range.begin, range.size(), buffer + static_cast<int64_t>(p) * chunk);
    }
  }
  op.written++;
  region_->chunk_counters(rank_).written.store(at + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

bool Exchange::reduce_chunk(Operation& op) {
  const Transfer& t = op.transfer;
  if (!in_segments(t) || op.reduced == op.written) return false;
  const uint64_t at = chunks_completed_ + op.reduced;
  if (any_behind(op, &ChunkCounters::written, at + 1)) return false;
  const Range range = chunk_of(t.inputs[0].size, op.reduced, chunk_bytes(t)), own = segment(range.size(), rank_, size_);
  const auto dtype = static_cast<c10::ScalarType>(t.fingerprint.dtype);
  c10::SmallVector<const char*, 16> ins;
  for (int r = 0; r < size_; r++)
    ins.push_back(r == rank_ ? t.inputs[0].data + range.begin + own.begin : region_->staging_buffer(r, at) + own.begin);
  char* staged = region_->staging_buffer(rank_, at) + own.begin;
  char* sum = t.outputs[0].data ? t.outputs[0].data + range.begin + own.begin : staged;
  reduce(static_cast<WireOp>(t.fingerprint.reduce_op), dtype, sum, {ins.data(), ins.size()},
         own.size() / static_cast<int64_t>(c10::elementSize(dtype)));
  if (sum != staged) copy(staged, sum, own.size());
  op.reduced++;
  region_->chunk_counters(rank_).reduced.store(at + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

bool Exchange::read_chunk(Operation& op) {
  const Transfer& t = op.transfer;
  if (op.read == (in_segments(t) ? op.reduced : op.written)) return false;
  const uint64_t at = chunks_completed_ + op.read;
  if (any_behind(op, in_segments(t) ? &ChunkCounters::reduced : &ChunkCounters::written, at + 1)) return false;
  const int64_t chunk = chunk_bytes(t);
  const int64_t mine = t.per_rank_inputs ? rank_ * chunk : 0;
  if (in_segments(t)) {
    const Range range = chunk_of(t.outputs[0].size, op.read, chunk);
    for (int r = 0; r < size_ && t.outputs[0].data; r++) {
      const Range theirs = segment(range.size(), r, size_);
      if (r != rank_)
        copy(t.outputs[0].data + range.begin + theirs.begin, region_->staging_buffer(r, at) + theirs.begin,
             theirs.size());
    }
  } else if (t.reduced) {
    const Range range = chunk_of(t.outputs[0].size, op.read, chunk);
    const auto dtype = static_cast<c10::ScalarType>(t.fingerprint.dtype);
    const auto element = static_cast<int64_t>(c10::elementSize(dtype));
    int64_t done = 0;
    for_each_span(t.inputs[static_cast<size_t>(rank_)], range.begin, range.size(), [&](const char* own, int64_t n) {
      c10::SmallVector<const char*, 16> ins;
      for (int r = 0; r < size_; r++) ins.push_back(r == rank_ ? own : region_->staging_buffer(r, at) + mine + done);
      reduce(static_cast<WireOp>(t.fingerprint.reduce_op), dtype, t.outputs[0].data + range.begin + done,
             {ins.data(), ins.size()}, n / element);
      done += n;
    });
  } else {
    for (int r = 0; r < size_; r++) {
      const Bytes& output = t.outputs[static_cast<size_t>(r)];
      if (r == rank_ || !output.data || !op.chunked[static_cast<size_t>(r)]) continue;
      const Range range = chunk_of(output.size, op.read, chunk);
      copy_in(output, range.begin, range.size(), region_->staging_buffer(r, at) + mine);
    }
  }
  op.read++;
  region_->chunk_counters(rank_).read.store(at + 1, std::memory_order_release);
  region_->ring(rank_);
  return true;
}

}  // namespace tessera::comm::region
