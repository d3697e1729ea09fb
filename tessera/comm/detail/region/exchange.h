#pragma once
#include "tessera/comm/detail/region/reduce.h"
#include "tessera/comm/detail/region/region.h"
#include "tessera/comm/detail/region/collective_stamp.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace tessera::comm::region {

// Memory that is given or taken: one piece, or several parts that count as one after the other. A part without data
// is padding, and is not written to.
struct Bytes {
  char* data = nullptr;
  int64_t size = 0;               // of all parts together
  std::vector<Bytes> parts = {};  // of one piece each; `data` is then not looked at, and not null
};
using BytesList = c10::SmallVector<Bytes, 8>;

// Calls f(memory, size) for the pieces that make up bytes [begin, begin + size) of it, in order. Padding: null.
template <class F>
void for_each_piece(const Bytes& bytes, int64_t begin, int64_t size, F f) {
  if (bytes.parts.empty()) {
    if (size > 0) f(bytes.data + begin, size);
    return;
  }
  for (const Bytes& part : bytes.parts) {
    if (size <= 0) return;
    if (begin >= part.size) {
      begin -= part.size;
      continue;
    }
    const int64_t here = std::min(size, part.size - begin);
    f(part.data ? part.data + begin : nullptr, here);
    size -= here;
    begin = 0;
  }
}
void copy_out(const Bytes& from, int64_t begin, int64_t size, char* to);
void copy_in(const Bytes& to, int64_t begin, int64_t size, const char* from);

// What one rank gives and takes in one collective.
//   pieces == false   gives[0] is for everybody          (all_reduce, all_gather, broadcast, ...)
//   pieces == true    gives[p] is for rank p only        (reduce_scatter, all_to_all, scatter)
//   reduced           takes[0] = what all gave this rank, reduced; null: not wanted
//   else              takes[r] = what rank r gave this rank; a null one is not wanted
// Parts: only gives of pieces, and takes that are not reduced, may have them.
// Requires: no take overlaps a give, except that the two may be the very same bytes where a rank gives to itself, or
// in an all_reduce.
struct Transfer {
  Stamp stamp{};
  bool pieces = false;
  bool reduced = false;
  BytesList gives;
  BytesList takes;
  std::vector<at::Tensor> keep;  // the memory behind gives and takes
  std::function<void()> finish;  // once all is there: copies to where the caller wants it
};

// Who is who, for errors.
struct Names {
  std::string group;
  std::vector<int64_t> ranks;  // global
};

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// One collective or message under way on one rank. Everything but `done` belongs to the exchange's mutex.
struct Operation : c10::intrusive_ptr_target {
  Transfer transfer;
  std::atomic<bool> done = false;   // also when failed
  std::string error;                // not empty: failed
  int missing = -1;                 // the rank whose bell it waits for
  FuturePtr future;                 // null unless somebody asked
  std::vector<at::Tensor> results;  // of the future

  // of a collective
  uint64_t number = 0;
  bool stamps_known = false;
  c10::SmallVector<bool, 8> streams;             // by rank: what it gives comes in chunks, not in its slot
  uint64_t chunks = 0;                           // of this rank, then, once all stamps are known, of the longest
  uint64_t written = 0, reduced = 0, taken = 0;  // chunks, by this rank

  // of a message
  int peer = -1;  // -1: a collective
  bool sends = false;
  uint64_t base = 0;    // chunks that went through the mailbox before
  uint64_t ticket = 0;  // recv: its turn among those from the same peer
};
using OperationPtr = c10::intrusive_ptr<Operation>;

// One rank's end of a region. An operation is moved on by whoever waits for anything in the group, or, once somebody
// has asked for a future, by a thread of the exchange as well. The collectives of a group complete in the order in
// which they were posted; those of different groups are independent.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  struct Options {
    std::chrono::milliseconds timeout{};
    bool spin = false;  // every rank of this machine has a core: wait actively for a moment before sleeping
  };
  Exchange(std::shared_ptr<Region> region, int rank, Names names, Options options);
  ~Exchange();

  OperationPtr post(Transfer transfer);  // publishes what fits and returns
  OperationPtr post_send(Transfer transfer, int to);
  OperationPtr post_recv(Transfer transfer, int from);
  void wait(Operation& op, std::chrono::milliseconds timeout);  // throws CommError
  bool poll(Operation& op);                                     // true if done or failed
  // Completes with `results`, whether or not anybody waits.
  FuturePtr future(Operation& op, const std::vector<at::Tensor>& results);
  std::string error_of(const Operation& op);
  void stop();  // ends the thread; futures that are left fail
  // And says so to the peers, which would wait in vain. `uncounted`: collectives of our own that no user has posted.
  void leave(uint64_t uncounted = 0);

  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  // exchange.cpp: slots and stamps. All below expect mutex_ to be held.
  void put_into_slot(Operation& op);
  bool read_stamps(Operation& op);
  bool agrees(const Operation& op, int r, const Stamp& theirs, int64_t given);
  void take_from_slots(Operation& op);
  void advance_all();  // all that can be done without waiting
  bool advance(Operation& op);
  void complete(Operation& op);
  void fail(const std::string& why);  // all operations, and the group: peers would only wait for this rank in vain
  void fail_as_told();                // as the poison says
  void check_sound(const Stamp& posting);
  std::string in(const Stamp& stamp, const std::string& why) const;
  std::string name_of(int rank) const;
  std::string left(int rank) const;
  std::string late(const Operation& op, int missing, std::chrono::milliseconds timeout) const;

  // stream.cpp: chunks.
  int64_t chunk_bytes(const Transfer& transfer) const;
  bool stream(Operation& op);  // true when complete
  bool write_chunk(Operation& op);
  bool reduce_chunk(Operation& op);
  bool take_chunk(Operation& op);
  bool behind(Operation& op, std::atomic<uint64_t> Stream::*count, uint64_t wanted);

  // mail.cpp: messages.
  bool advance_mail(Operation& op);
  bool advance_send(Operation& op);
  bool advance_recv(Operation& op);

  // waiting.cpp. `missing` says for whom to wait, -1: for nobody any more. False: the deadline came first.
  bool drive(Lock& lock, const std::function<int()>& missing, Clock::time_point deadline);
  bool help_others();
  void enlist();
  void hand_out_futures(Lock& lock);
  void progress();

  const std::shared_ptr<Region> region_;
  const int rank_;
  const int size_;
  const Names names_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex mutex_;
  int spins_;                                       // looks at the bell before sleeping; 0: never
  uint64_t posted_ = 0;                             // collectives
  uint64_t streamed_ = 0;                           // chunks of the collectives that are complete
  std::deque<OperationPtr> collectives_;            // under way, oldest first
  std::vector<OperationPtr> messages_;              // under way
  std::vector<uint64_t> mail_sent_;                 // chunks promised to each peer
  std::vector<uint64_t> mail_asked_, mail_served_;  // receives from each peer: asked for, completed
  std::string failure_;                             // not empty: the group is lost

  size_t futures_ = 0;                     // asked for and not complete
  std::vector<OperationPtr> handing_out_;  // complete; their futures are told without the lock
  std::condition_variable asked_;
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace tessera::comm::region
