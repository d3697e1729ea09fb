#pragma once
#include "tessera/comm/detail/records.h"
#include "tessera/comm/detail/region/shared_region.h"

#include <atomic>
#include <string>

// The status of every rank of this machine, in shared memory. Each rank writes only its own row.
//
//   first failure | rank 0: state, heartbeats, last collective of each of its groups | rank 1 ...
//
// The liveness monitors of the other ranks read it: which rank has no heartbeat any more, and what it posted last.
namespace tessera::comm::watch {

enum class RankState : uint32_t { Absent, Running, Left, Failed };

// The last collective that a rank has posted on one group.
struct LastCollective {
  uint64_t group = 0;  // hash of the group's key, the same on all members; 0: unused row
  uint64_t sequence = 0;
  int64_t bytes = 0;
  CommKind kind = CommKind::Barrier;
  Family family = Family::C10d;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  bool waiting = false;  // the rank is in wait()
  char tensor_name[44] = {};
};
std::string to_text(const LastCollective& collective);  // "allreduce_ #4 ('wq.grad')"

class RankStatusTable {
 public:
  static constexpr int kGroups = 64;  // groups per rank; further groups are not recorded

  // `path`: of the table that the first rank of the machine has created; empty: this rank creates it.
  RankStatusTable(int ranks, const std::string& path);
  std::string path() const { return memory_.path(); }

  // Called by the rank itself. `local_rank` counts the ranks of this machine.
  void join(int local_rank, uint64_t start_time);  // `start_time`: ProcessStatus::start_time
  void heartbeat(int local_rank) { rank(local_rank).heartbeats.fetch_add(1, std::memory_order_relaxed); }
  void set_state(int local_rank, RankState state) { rank(local_rank).state.store(state); }
  void fail(int local_rank, const std::string& message);  // sets RankState::Failed; only the first message is stored
  void write(int local_rank, int row, const LastCollective& collective);  // and sets waiting to false
  void set_waiting(int local_rank, int row, bool waiting) {
    rank(local_rank).groups[row].waiting.store(waiting, std::memory_order_relaxed);
  }

  // Called by the other ranks.
  RankState state(int local_rank) const { return rank(local_rank).state.load(); }
  uint64_t start_time(int local_rank) const { return rank(local_rank).start_time.load(); }
  uint64_t heartbeats(int local_rank) const { return rank(local_rank).heartbeats.load(std::memory_order_relaxed); }
  std::string message(int local_rank) const;
  LastCollective last(int local_rank, uint64_t group) const;  // .group == 0: it has posted nothing on the group

  // The first rank that was lost, whoever detected it. Later losses are mostly consequences of the first.
  void record_first_failure(int64_t global_rank, const std::string& why);  // only the first call has an effect
  int64_t first_failed_rank() const;                                       // -1: no rank has failed
  std::string first_failure() const;

 private:
  struct GroupRow {
    std::atomic<uint32_t> version;  // odd: being written
    std::atomic<uint32_t> waiting;
    LastCollective collective;
  };
  struct alignas(64) RankRow {
    std::atomic<RankState> state;
    std::atomic<uint64_t> start_time, heartbeats;
    std::atomic<uint32_t> message_state;  // 1: being written, 2: valid
    char message[484];
    GroupRow groups[kGroups];
  };
  struct alignas(64) FirstFailure {
    std::atomic<uint32_t> state;  // 1: being written, 2: valid
    int64_t rank;
    char why[496];
  };
  FirstFailure& first() const { return *reinterpret_cast<FirstFailure*>(memory_.data()); }
  RankRow& rank(int local_rank) const {
    return reinterpret_cast<RankRow*>(memory_.data() + sizeof(FirstFailure))[local_rank];
  }
  region::SharedMemory memory_;
};

}  // namespace tessera::comm::watch
