#pragma once
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// Checks that all ranks of a group are about to post the same collective, before it is posted to a backend that does
// not check this itself.
namespace tessera::comm::watch {

// The bytes that this rank sends to and receives from each rank of the group, as in MPI_Alltoallv.
// -1: nothing, or unknown.
struct SendRecvBytes {
  explicit SendRecvBytes(int ranks) : send(static_cast<size_t>(ranks), -1), recv(send) {}
  std::vector<int64_t> send, recv;
};

// One collective whose comparison is in progress.
struct PendingCheck {
  virtual ~PendingCheck() = default;
  virtual bool done() = 0;                                   // the ranks agree, or the comparison failed
  virtual std::string error() = 0;                           // valid once done; "": all ranks agree
  virtual void wait(std::chrono::milliseconds timeout) = 0;  // until done; throws CommError
};
using PendingCheckPtr = std::shared_ptr<PendingCheck>;

struct Comparer {
  virtual ~Comparer() = default;
  // Publishes what this rank is about to post, and returns. `then` runs once when the comparison is done, on any
  // thread.
  virtual PendingCheckPtr post(const region::CollectiveFingerprint& fingerprint, const SendRecvBytes& sizes,
                               const std::function<void()>& then) = 0;
  virtual void abort_with(const std::string& reason) = 0;  // fails current and later comparisons
  virtual void leave() = 0;                                // the last call
};

// Describes two ranks whose sizes do not match; "": all match. `all_sizes` has one entry per rank of the group. If one
// rank does not match the others, the text says so, and the rank is noted as the culprit.
std::string difference_of_sizes(const std::vector<SendRecvBytes>& all_sizes, const std::vector<int64_t>& global_ranks);

// Compares every collective, through shared memory. Returns when all members are connected.
// Requires: options.one_host.
std::shared_ptr<Comparer> compare_by_region(const ConnectOptions& options);

// Compares the first `max_compared` collectives through the store, on a thread of its own. Later ones are not compared.
// The ranks may be on different hosts.
std::shared_ptr<Comparer> compare_by_store(const ConnectOptions& options, uint64_t max_compared);

}  // namespace tessera::comm::watch
