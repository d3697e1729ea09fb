#pragma once
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

// The memory through which the ranks of one machine talk. It holds no pointers, so it may as well be a shared mapping.
//
//   header | a bell a rank | a slot head a rank and ring place | a mail head an ordered pair | slot data | mail data
//
// Nouns. A rank owns a ring of kRing *slots*; collective number q of the group uses slot q % kRing on every rank. A
// slot has two halves; a collective larger than a half travels as *chunks*, alternating between them. `published`
// counts the chunks the owner has ever put into its slot, `departed` those of its peers' that it has finished reading;
// since all ranks run the same collectives, these counts mean the same thing on all of them:
//
//   chunk i may be read   once  owner.published > i
//   chunk i may be written once every peer.departed > i - 2        (the half is free again)
//
// Whoever changes a count rings its *bell*, the word on which those sleep who wait for that rank.
namespace tessera::comm::region {

constexpr int kRing = 8;
constexpr int kHalves = 2;

// What a rank says about its collective, so that peers can tell that they mean the same one.
struct Stamp {
  uint64_t sequence;
  uint64_t chunks;
  int32_t root;
  int32_t tag;        // of a message; else the number of the comm::Label
  uint8_t kind;       // comm::Kind
  uint8_t family;     // comm::Family
  uint8_t dtype;      // c10::ScalarType
  uint8_t reduce_op;  // c10d::ReduceOp::RedOpType
  char tensor_name[44];
};

struct alignas(64) Head {  // of a slot, or of a mailbox
  std::atomic<uint64_t> published;
  std::atomic<uint64_t> departed;
  Stamp stamp;  // of the collective whose chunks are being published; written before its first
};

struct alignas(64) Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> sleepers;
};

struct alignas(64) RegionHeader {
  std::atomic<uint32_t> poison;  // 0: sound, 1: being written, 2: `reason` holds
  char reason[1020];
};

struct Layout {
  int ranks = 0;
  int64_t half_bytes = 0;  // of a slot
  int64_t mail_bytes = 0;  // half of a mailbox

  size_t bells() const;
  size_t slots() const;
  size_t mailboxes() const;
  size_t slot_data() const;
  size_t mail_data() const;
  size_t total() const;
};

// A view of the mapped bytes, and the waiting. `shared`: other processes map it too.
class Region {
 public:
  Region(char* base, Layout layout, bool shared) : base_(base), layout_(layout), shared_(shared) {}

  const Layout& layout() const { return layout_; }
  RegionHeader& header() { return at<RegionHeader>(0); }
  Bell& bell(int rank) { return at<Bell>(layout_.bells() + static_cast<size_t>(rank) * sizeof(Bell)); }
  Head& slot(int rank, int place);
  char* slot_half(int rank, int place, uint64_t chunk);
  Head& mailbox(int from, int to);
  char* mail_half(int from, int to, uint64_t chunk);

  void ring(int rank);  // after a change to a count of `rank`
  // Sleeps until `rank` rings again or `until`. Gives `rung` as it was before the condition was last tested.
  void sleep(int rank, uint32_t rung, std::chrono::steady_clock::time_point until);

  void poison(const std::string& reason);  // the first reason stays
  bool poisoned() { return header().poison.load(std::memory_order_acquire) != 0; }
  std::string poison_reason();

 private:
  template <class T>
  T& at(size_t offset) {
    return *reinterpret_cast<T*>(base_ + offset);
  }
  char* base_;
  Layout layout_;
  bool shared_;
};

}  // namespace tessera::comm::region
