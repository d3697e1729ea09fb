#pragma once
#include "tessera/comm/detail/region/collective_fingerprint.h"
#include "tessera/comm/detail/region/reduce.h"
#include "tessera/comm/detail/region/region.h"

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

// An input or output buffer: one span of memory, or several parts that count as concatenated. A part with null data is
// padding. Padding is never written to.
struct Bytes {
  char* data = nullptr;
  int64_t size = 0;               // of all parts together
  std::vector<Bytes> parts = {};  // one span each; `data` is then not null and not used
};
using BytesList = c10::SmallVector<Bytes, 8>;

// Calls f(memory, size), in order, for the spans that make up bytes [begin, begin + size). Padding has null memory.
template <class F>
void for_each_span(const Bytes& bytes, int64_t begin, int64_t size, F f) {
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

// The inputs and outputs of one rank in one collective.
//   per_rank_inputs == false   inputs[0] goes to every rank            (all_reduce, all_gather, broadcast, ...)
//   per_rank_inputs == true    inputs[p] goes to rank p only           (reduce_scatter, all_to_all, scatter)
//   reduced == true            outputs[0] = the reduction of the inputs for this rank; null: this rank needs no result
//   reduced == false           outputs[r] = the input of rank r for this rank; null: not needed
// Only per-rank inputs, and outputs that are not reduced, may have several parts.
// Requires: no output overlaps an input. Exception: both may be exactly the same bytes if a rank sends to itself, or in
// an all_reduce.
struct Transfer {
  CollectiveFingerprint fingerprint{};
  bool per_rank_inputs = false;
  bool reduced = false;
  BytesList inputs;
  BytesList outputs;
  std::vector<at::Tensor> keep;  // own the memory of inputs and outputs
  std::function<void()> finish;  // runs when all outputs are filled: copies them into the caller's tensors
};

// Used in error messages.
struct GroupInfo {
  std::string group;
  std::vector<int64_t> ranks;  // global ranks
};

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// One collective or message in flight on one rank. The mutex of the Exchange protects all members except `done`.
struct Operation : c10::intrusive_ptr_target {
  Transfer transfer;
  std::atomic<bool> done = false;   // also true if it failed
  std::string error;                // not empty: failed
  int awaited_rank = -1;            // the rank whose doorbell it waits for
  FuturePtr future;                 // null until getFuture() is called
  std::vector<at::Tensor> results;  // value of the future

  // Collectives only:
  uint64_t number = 0;
  bool fingerprints_known = false;
  c10::SmallVector<bool, 8> chunked;            // by rank: its input comes in chunks, not in its slot
  uint64_t chunks = 0;                          // of this rank; the maximum over all ranks once fingerprints are known
  uint64_t written = 0, reduced = 0, read = 0;  // chunks done by this rank

  // Messages only:
  int peer = -1;  // -1: a collective
  bool sends = false;
  uint64_t base = 0;    // bytes that the channel carried before this message
  uint64_t length = 0;  // bytes in the ring of the channel; 0: not known yet
  uint64_t moved = 0;   // of them, written or read by this rank
  uint64_t ticket = 0;  // recv: its number among the receives from the same peer
};
using OperationPtr = c10::intrusive_ptr<Operation>;

// One rank's endpoint of a region. Any thread that waits for an operation of the group advances all operations of it.
// A progress thread advances them too, once a future has been requested or a send did not fit into its channel. The
// collectives of one group complete in the order in which they were posted. Different groups are independent.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  struct Options {
    std::chrono::milliseconds timeout{};
    bool spin = false;  // every rank of this machine has its own core: busy-wait for a moment before sleeping
  };
  Exchange(std::shared_ptr<Region> region, int rank, GroupInfo group, Options options);
  ~Exchange();

  OperationPtr post(Transfer transfer);  // publishes what fits and returns
  OperationPtr post_send(Transfer transfer, int to);
  OperationPtr post_recv(Transfer transfer, int from);
  void wait(Operation& op, std::chrono::milliseconds timeout);  // throws CommError
  bool poll(Operation& op);                                     // true if it is done or failed
  // A future that completes with `results`, whether or not a thread waits for the operation.
  FuturePtr future(Operation& op, const std::vector<at::Tensor>& results);
  std::string error_of(const Operation& op);
  void stop();  // ends the progress thread; incomplete futures fail
  // stop(), then records in the region that this rank has left, so that peers do not wait for it.
  // `internal_collectives`: how many of the posted collectives were not posted by the user.
  void leave(uint64_t internal_collectives = 0);

  std::chrono::milliseconds timeout() const { return timeout_.load(); }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  // exchange.cpp: slots and fingerprints. All functions below require that mutex_ is locked.
  void put_into_slot(Operation& op);
  bool read_fingerprints(Operation& op);
  std::string difference_from(const Operation& op, int r);  // "": rank r has posted the same collective
  bool check_peers(const Operation& op);
  void fail_with_difference(const Operation& op, int r);
  int64_t input_bytes(const Operation& op, int r);  // of rank r, for this rank
  void read_slots(Operation& op);
  void advance_all();  // does everything that needs no waiting
  bool advance(Operation& op);
  void complete(Operation& op);
  // Fails all operations and aborts the group, so that peers do not wait. `culprit`: the rank that caused it; -1:
  // unknown.
  void fail(const std::string& why, int culprit = -1);
  void fail_with_abort_reason();  // a peer has aborted the group
  void check_not_failed(const CollectiveFingerprint& posted);
  std::string with_context(const CollectiveFingerprint& fingerprint, const std::string& why) const;
  std::string name_of(int rank) const;
  std::string left_message(int rank) const;
  std::string timeout_message(const Operation& op, int awaited_rank, std::chrono::milliseconds timeout) const;

  // chunked_exchange.cpp
  int64_t chunk_bytes(const Transfer& transfer) const;
  bool exchange_chunks(Operation& op);  // true when complete
  bool write_chunk(Operation& op);
  bool reduce_chunk(Operation& op);
  bool read_chunk(Operation& op);
  bool any_behind(Operation& op, std::atomic<uint64_t> ChunkCounters::*counter, uint64_t wanted);

  // send_recv.cpp
  bool advance_p2p(Operation& op);
  bool advance_send(Operation& op);
  bool advance_recv(Operation& op);

  // exchange_progress.cpp
  // Advances operations until awaited_rank() is -1. awaited_rank() returns the rank to wait for.
  // Returns false if the deadline is reached first.
  bool progress_until(Lock& lock, const std::function<int()>& awaited_rank, Clock::time_point deadline);
  bool progress_other_groups();
  void mark_active();
  void complete_futures(Lock& lock);
  // The oldest send that waits for its peer to make room, without a future. Null if every send is complete.
  OperationPtr waiting_send() const;
  void want_progress();  // starts or wakes the progress thread
  void run_progress_thread();

  const std::shared_ptr<Region> region_;
  const int rank_;
  const int size_;
  const GroupInfo group_;
  std::atomic<std::chrono::milliseconds> timeout_;

  std::mutex mutex_;
  int spins_;                                             // polls of the doorbell before sleeping; 0: no busy-waiting
  uint64_t posted_ = 0;                                   // collectives
  uint64_t chunks_completed_ = 0;                         // chunks of the completed collectives
  std::deque<OperationPtr> collectives_;                  // in flight, oldest first
  std::vector<OperationPtr> messages_;                    // in flight
  std::vector<uint64_t> p2p_bytes_sent_;                  // by peer; posted sends included
  std::vector<uint64_t> recvs_posted_, recvs_completed_;  // by peer
  std::string failure_;                                   // not empty: the group is unusable

  size_t futures_ = 0;                             // requested and not complete
  std::vector<OperationPtr> futures_to_complete_;  // operations are done; their futures complete without the lock
  std::condition_variable progress_wanted_;
  std::thread thread_;
  bool stopping_ = false;
};

}  // namespace tessera::comm::region
