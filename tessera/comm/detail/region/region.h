#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

// The memory through which the ranks of one machine talk. It holds no pointers, so it may as well be a shared mapping.
//
//   header | members | bells | slot heads | stream heads | mailbox heads | slot data | stage data | mail data
//
// Nouns. A rank owns a ring of kRing *slots*; collective number q of the group uses slot q % kRing on every rank. The
// slot holds the stamp of the collective, and also what the rank gives where that fits. What does not fit travels as
// *chunks* through the rank's kStages *stages*, chunk i through stage i % kStages. A *mailbox* carries the messages of
// one ordered pair of ranks. All counts only grow, and mean the same thing on every rank, since all run the same
// collectives:
//
//   slot     `published`  collectives put into it       `departed`  collectives of this slot, read from all peers
//   stream   `written`    chunks put into the stages    `reduced`   chunks whose own segment is summed
//                                                       `read`      chunks read from all peers
//
// Whoever changes a count rings its *bell*, the word on which those sleep who wait for that rank.
namespace tessera::comm::region {

constexpr int kRing = 8;
constexpr int kStages = 4;
constexpr int kMailHalves = 2;

// What a rank says about its collective, so that peers can tell that they mean the same one.
struct Stamp {
  uint64_t sequence;
  uint64_t chunks;  // that this rank has to give; 0: all of it is in the slot
  int32_t root;
  int32_t tag;        // of a message; else the number of the comm::Label
  uint8_t kind;       // comm::Kind
  uint8_t family;     // comm::Family
  uint8_t dtype;      // c10::ScalarType
  uint8_t reduce_op;  // c10d::ReduceOp::RedOpType
  char tensor_name[44];
};

struct alignas(64) Slot {
  std::atomic<uint64_t> published;
  std::atomic<uint64_t> departed;
  Stamp stamp;
};

struct alignas(64) Stream {
  std::atomic<uint64_t> written;
  std::atomic<uint64_t> reduced;
  std::atomic<uint64_t> read;
};

struct alignas(64) Mailbox {
  std::atomic<uint64_t> published;  // by the sender
  std::atomic<uint64_t> departed;   // by the receiver
  int64_t bytes;                    // of the message whose chunks are being published
  Stamp stamp;
};

struct alignas(64) Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleepers;
};

// A member that has left posts nothing any more; what it had published can still be read.
struct alignas(64) Member {
  std::atomic<uint32_t> left;
  std::atomic<uint64_t> collectives;  // posted until then
};

struct alignas(64) RegionHeader {
  std::atomic<uint32_t> poison;  // 0: sound, 1: being written, 2: `reason` holds
  std::atomic<uint32_t> mapped;  // members that have it; counted where ranks are processes
  char reason[1016];
};

// Sizes of a region for so many ranks, and where its parts begin. A rank costs about
//   kRing * slot_bytes + kStages * stage_bytes + 2 * ranks * mail_bytes        (4 ranks, as set: 1.5 MiB)
struct Layout {
  int ranks = 0;
  int64_t slot_bytes = 0;
  int64_t stage_bytes = 0;
  int64_t mail_bytes = 0;  // half of a mailbox

  static Layout of(int ranks);  // as the settings TESSERA_SLOT_BYTES and TESSERA_STAGE_BYTES say

  size_t members() const;
  size_t bells() const;
  size_t slots() const;
  size_t streams() const;
  size_t mailboxes() const;
  size_t slot_data() const;
  size_t stage_data() const;
  size_t mail_data() const;
  size_t total() const;
};

// A view of the mapped bytes, and the waiting. `shared`: other processes map it too.
class Region {
 public:
  Region(char* base, Layout layout, bool shared) : base_(base), layout_(layout), shared_(shared) {}

  const Layout& layout() const { return layout_; }
  RegionHeader& header() { return at<RegionHeader>(0, 0); }
  Member& member(int rank) { return at<Member>(layout_.members(), rank); }
  Bell& bell(int rank) { return at<Bell>(layout_.bells(), rank); }
  Slot& slot(int rank, int place) { return at<Slot>(layout_.slots(), rank * kRing + place); }
  Stream& stream(int rank) { return at<Stream>(layout_.streams(), rank); }
  Mailbox& mailbox(int from, int to) { return at<Mailbox>(layout_.mailboxes(), from * layout_.ranks + to); }
  char* slot_data(int rank, int place);
  char* stage(int rank, uint64_t chunk);
  char* mail_half(int from, int to, uint64_t chunk);

  void ring(int rank);  // after a change to a count of `rank`
  // Sleeps until `rank` rings again or `until`. Give `rung` as it was before the condition was last tested.
  void sleep(int rank, uint32_t rung, std::chrono::steady_clock::time_point until);

  void leave(int rank, uint64_t collectives);  // `rank` is gone after so many; whoever waits for it hears of it
  bool has_left(int rank) { return member(rank).left.load(std::memory_order_acquire) != 0; }

  void poison(const std::string& reason);  // the first reason stays
  bool poisoned() { return header().poison.load(std::memory_order_acquire) != 0; }
  std::string poison_reason();

 private:
  template <class T>
  T& at(size_t offset, int place) {
    return *reinterpret_cast<T*>(base_ + offset + static_cast<size_t>(place) * sizeof(T));
  }
  char* base_;
  Layout layout_;
  bool shared_;
};

}  // namespace tessera::comm::region
