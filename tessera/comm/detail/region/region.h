#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

// The shared memory of one group whose ranks are on one machine. It holds no pointers, so ranks can be processes that
// map it at different addresses.
//
//   header | members | doorbells | slots | chunk counters | p2p channels | slot data | staging data | channel data
//
// Slots.     Each rank owns a ring of kRing slots. Collective number q of the group uses slot q % kRing on every rank.
//            A slot holds the fingerprint of the collective, and the rank's input if the input fits.
// Chunks.    A larger input is sent in chunks through the rank's kStagingBuffers staging buffers. Chunk i uses buffer
//            i % kStagingBuffers.
// Channels.  A P2PChannel carries the send/recv messages from one rank to one other rank, through a ring of bytes. A
//            message is a MessageHead and its bytes, padded to a multiple of the cache line. As many messages as fit
//            are in the ring at once; a larger one passes through it in parts.
//
// All counters only grow. They mean the same on every rank, because all ranks run the same collectives:
//
//   slot             `published`  collectives written to the slot     `consumed`  collectives read from all peers
//   chunk counters   `written`    chunks written to staging buffers   `reduced`   chunks whose own segment is reduced
//                                                                     `read`      chunks read from all peers
//
// A rank that changes a counter rings its doorbell: the futex on which peers sleep while they wait for that rank.
namespace tessera::comm::region {

constexpr int kRing = 8;
constexpr int kStagingBuffers = 4;

// Identifies a collective. The ranks compare fingerprints to check that all of them post the same collective
// (c10d::ProcessGroupWrapper does the same).
struct CollectiveFingerprint {
  uint64_t sequence;
  uint64_t chunks;  // chunks of this rank's input; 0: the input is in the slot
  int32_t root;
  int32_t tag;        // the tag of a send or recv; else the number of the comm::CollectiveLabel
  uint8_t kind;       // comm::CommKind
  uint8_t family;     // comm::Family
  uint8_t dtype;      // c10::ScalarType
  uint8_t reduce_op;  // c10d::ReduceOp::RedOpType
  char tensor_name[44];
};

struct alignas(64) Slot {
  std::atomic<uint64_t> published;
  std::atomic<uint64_t> consumed;
  CollectiveFingerprint fingerprint;
};

struct alignas(64) ChunkCounters {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> reduced;
  std::atomic<uint64_t> read;
};

struct alignas(64) P2PChannel {
  std::atomic<uint64_t> published;  // bytes; written by the sender
  std::atomic<uint64_t> consumed;   // bytes; written by the receiver
};

// Precedes the bytes of a message in a channel.
struct alignas(64) MessageHead {
  CollectiveFingerprint fingerprint;
  int64_t bytes;
};

struct alignas(64) Doorbell {
  std::atomic<uint32_t> rings;
  std::atomic<uint32_t> waiters;
};

// A member that has left posts nothing more. Peers can still read what it has published.
struct alignas(64) Member {
  std::atomic<uint32_t> left;
  std::atomic<uint64_t> collectives;  // number of collectives posted before it left
};

struct alignas(64) RegionHeader {
  std::atomic<uint32_t> abort_state;  // 0: not aborted, 1: `reason` is being written, 2: `reason` is valid
  std::atomic<uint32_t> mapped;       // members that have mapped the region; counted if ranks are processes
  std::atomic<int64_t> culprit;       // the rank that caused the abort; -1: unknown. Valid with `reason`
  char reason[1008];
};

// Sizes of a region for `ranks` ranks, and the offsets of its parts. One rank takes about
//   kRing * slot_bytes + kStagingBuffers * staging_bytes + ranks * channel_bytes     (default, 4 ranks: 1.5 MiB)
struct RegionLayout {
  int ranks = 0;
  int64_t slot_bytes = 0;
  int64_t staging_bytes = 0;  // one staging buffer
  int64_t channel_bytes = 0;  // the ring of one channel

  static RegionLayout of(int ranks);  // reads the settings TESSERA_SLOT_BYTES and TESSERA_STAGE_BYTES

  size_t members() const;
  size_t doorbells() const;
  size_t slots() const;
  size_t chunk_counters() const;
  size_t channels() const;
  size_t slot_data() const;
  size_t staging_data() const;
  size_t channel_data() const;
  size_t total() const;
};

// Rounds up to a multiple of the cache line size.
constexpr int64_t round_up_to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Typed access to the mapped bytes, and the doorbells. `shared`: other processes map the region too.
class Region {
 public:
  Region(char* base, RegionLayout layout, bool shared) : base_(base), layout_(layout), shared_(shared) {}

  const RegionLayout& layout() const { return layout_; }
  RegionHeader& header() { return at<RegionHeader>(0, 0); }
  Member& member(int rank) { return at<Member>(layout_.members(), rank); }
  Doorbell& doorbell(int rank) { return at<Doorbell>(layout_.doorbells(), rank); }
  Slot& slot(int rank, int index) { return at<Slot>(layout_.slots(), rank * kRing + index); }
  ChunkCounters& chunk_counters(int rank) { return at<ChunkCounters>(layout_.chunk_counters(), rank); }
  P2PChannel& channel(int from, int to) { return at<P2PChannel>(layout_.channels(), from * layout_.ranks + to); }
  char* slot_data(int rank, int index);
  char* staging_buffer(int rank, uint64_t chunk);
  char* channel_ring(int from, int to);

  void ring(int rank);  // call it after a change to a counter of `rank`
  // Sleeps until `rank` rings its doorbell or `until` is reached.
  // `rings` is the value of Doorbell::rings from before the last test of the condition.
  void sleep(int rank, uint32_t rings, std::chrono::steady_clock::time_point until);

  // Records that `rank` has left after `collectives` collectives, and wakes the ranks that wait for it.
  void leave(int rank, uint64_t collectives);
  bool has_left(int rank) { return member(rank).left.load(std::memory_order_acquire) != 0; }

  // Wakes all ranks. Only the first reason is stored, with the rank that was noted as its culprit (base/error_file.h).
  void abort(const std::string& reason);
  bool aborted() { return header().abort_state.load(std::memory_order_acquire) != 0; }
  std::string abort_reason();  // also notes the culprit in this process

 private:
  template <class T>
  T& at(size_t offset, int index) {
    return *reinterpret_cast<T*>(base_ + offset + static_cast<size_t>(index) * sizeof(T));
  }
  char* base_;
  RegionLayout layout_;
  bool shared_;
};

}  // namespace tessera::comm::region
