#pragma once
#include "tessera/comm/region/reduce.h"
#include "tessera/comm/region/region.h"

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <memory>
#include <string>
#include <vector>

namespace tessera::comm::region {

struct Bytes {
  char* data = nullptr;
  int64_t size = 0;
};
using BytesList = c10::SmallVector<Bytes, 8>;

// What one rank gives and takes in one collective.
//   pieces == false   gives[0] is for everybody          (all_reduce, all_gather, broadcast, ...)
//   pieces == true    gives[p] is for rank p only        (reduce_scatter, all_to_all, scatter)
//   reduced           takes[0] = what all gave this rank, reduced
//   else              takes[r] = what rank r gave this rank; a null one is not wanted
struct Transfer {
  Stamp stamp{};
  bool pieces = false;
  bool reduced = false;
  BytesList gives;
  BytesList takes;
  std::vector<at::Tensor> keep;  // the memory behind gives and takes
};

// Who is who, for errors.
struct Names {
  std::string group;
  std::vector<int64_t> ranks;  // global
};

class Exchange;

// One collective under way on one rank. Advanced by whoever waits; never blocks by itself.
struct Operation : c10::intrusive_ptr_target {
  Transfer transfer;
  int place = 0;        // in the ring
  uint64_t base = 0;    // chunks that went through this slot before
  uint64_t chunks = 0;  // of this rank, then, once all stamps are known, of the longest
  uint64_t sent = 0;
  uint64_t got = 0;
  bool stamps_known = false;
  int peer = -1;        // of a send or recv; -1: a collective
  bool sends = false;   // a send
  uint64_t ticket = 0;  // recv: its turn among those from the same peer
  int missing = -1;     // the rank whose bell it waits for
  bool done = false;
  std::string error;  // not empty: failed
};
using OperationPtr = c10::intrusive_ptr<Operation>;

// One rank's end of a region. Used by one thread, the rank's.
class Exchange {
 public:
  Exchange(std::shared_ptr<Region> region, int rank, Names names, std::chrono::milliseconds timeout);
  ~Exchange();

  OperationPtr post(Transfer transfer);  // publishes what fits and returns
  OperationPtr post_send(Transfer transfer, int to);
  OperationPtr post_recv(Transfer transfer, int from);
  void wait(Operation& op, std::chrono::milliseconds timeout);  // throws CommError
  bool poll(Operation& op);                                     // true if done or failed
  void poison(const std::string& reason);
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  bool advance(Operation& op);
  bool advance_mail(Operation& op);
  bool all_departed(Operation& op);
  bool read_stamps(Operation& op);
  void write_chunk(Operation& op);
  void read_chunk(Operation& op);
  int64_t piece_bytes(const Transfer& transfer) const;
  // Peers may be waiting for this rank's part in it: a message, more chunks than fit, or a ring that fills up.
  bool needs_help(const Operation& op) const {
    return op.peer >= 0 || op.chunks > kHalves || outstanding_.size() >= kRing / 2;
  }
  bool help(const Operation* except);  // advances what peers may be waiting for; true if there was such
  static bool help_all(const Operation* except);
  void check_sound();  // throws if the group was poisoned
  void enlist();
  void retire(Operation& op);
  [[noreturn]] void fail(Operation& op, const std::string& why);
  std::string describe(const Stamp& stamp) const;
  std::string name_of(int rank) const;

  std::shared_ptr<Region> region_;
  int rank_;
  int size_;
  Names names_;
  std::chrono::milliseconds timeout_;
  int spins_;
  uint64_t posted_ = 0;                             // collectives
  uint64_t place_chunks_[kRing] = {};               // chunks that went through each place so far
  OperationPtr in_place_[kRing];                    // the collective that now uses it
  std::vector<uint64_t> mail_sent_;                 // chunks promised to each peer
  std::vector<uint64_t> mail_asked_, mail_served_;  // receives from each peer: asked for, completed
  std::vector<OperationPtr> outstanding_;
};

}  // namespace tessera::comm::region
