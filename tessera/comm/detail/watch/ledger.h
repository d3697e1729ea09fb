#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/shared_region.h"

#include <atomic>
#include <string>

// What every rank of this machine is doing, in memory that all of them see and only the rank itself writes.
//
//   first | rank 0: who it is, its state and beats; last collective of each of its groups | rank 1 ...
//
// Its readers are the others' watches: who has stopped beating, and what it did last.
namespace tessera::comm::watch {

enum class State : uint32_t { Absent, Running, Left, Failed };

// The last collective a rank has posted on one group.
struct Entry {
  uint64_t group = 0;  // hash of the group's key: the same on all its members; 0: a free place
  uint64_t sequence = 0;
  int64_t bytes = 0;
  Kind kind = Kind::Barrier;
  Family family = Family::C10d;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool waits = false;  // for it to complete
  char tensor_name[44] = {};
};
std::string to_text(const Entry& entry);  // "allreduce_ #4 ('wq.grad')"

class Ledger {
 public:
  static constexpr int kGroups = 64;  // of a rank; later ones are not written down

  // `path`: of the one that the machine's first rank has made; empty: this rank is that one.
  Ledger(int ranks, const std::string& path);
  std::string path() const { return memory_.path(); }

  // `place`: among the ranks of this machine. What follows is for the rank itself ...
  void join(int place, uint64_t started);  // `started`: as look_at_process says
  void beat(int place) { rank(place).beats.fetch_add(1, std::memory_order_relaxed); }
  void set_state(int place, State state) { rank(place).state.store(state); }
  void fail(int place, const std::string& message);    // State::Failed; the first message stays
  void write(int place, int row, const Entry& entry);  // posted; nobody waits for it yet
  void set_waits(int place, int row, bool waits) {
    rank(place).rows[row].waits.store(waits, std::memory_order_relaxed);
  }

  // ... and this for the others.
  State state(int place) const { return rank(place).state.load(); }
  uint64_t started(int place) const { return rank(place).started.load(); }
  uint64_t beats(int place) const { return rank(place).beats.load(std::memory_order_relaxed); }
  std::string message(int place) const;
  Entry last(int place, uint64_t group) const;  // group 0: it has posted nothing there

  // The first rank that was lost, whoever saw it: what came after are mostly consequences.
  void blame(int64_t global_rank, const std::string& why);  // the first stays
  int64_t first_lost() const;                               // -1: none
  std::string first_reason() const;

 private:
  struct Row {
    std::atomic<uint32_t> version;  // odd: being written
    std::atomic<uint32_t> waits;
    Entry entry;
  };
  struct alignas(64) Rank {
    std::atomic<State> state;
    std::atomic<uint64_t> started, beats;
    std::atomic<uint32_t> message_ready;  // 1: being written, 2: holds
    char message[484];
    Row rows[kGroups];
  };
  struct alignas(64) First {
    std::atomic<uint32_t> ready;  // 1: being written, 2: holds
    int64_t rank;
    char why[496];
  };
  First& first() const { return *reinterpret_cast<First*>(memory_.data()); }
  Rank& rank(int place) const {
    return *reinterpret_cast<Rank*>(memory_.data() + sizeof(First) + static_cast<size_t>(place) * sizeof(Rank));
  }
  region::SharedMemory memory_;
};

}  // namespace tessera::comm::watch
