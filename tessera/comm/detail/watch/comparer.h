#pragma once
#include "tessera/comm/backends.h"
#include "tessera/comm/detail/region/region.h"

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

// Do all ranks of a group mean the same collective? Asked before it is posted to a backend that would not notice.
namespace tessera::comm::watch {

// How many bytes this rank gives to and takes from each rank of the group. -1: nothing, or it is not for us to say.
struct Claim {
  explicit Claim(int ranks) : gives(static_cast<size_t>(ranks), -1), takes(gives) {}
  std::vector<int64_t> gives, takes;
};

// One collective under comparison.
struct Check {
  virtual ~Check() = default;
  virtual bool done() = 0;                                   // agreed, or failed
  virtual std::string error() = 0;                           // once done; "": all agree
  virtual void wait(std::chrono::milliseconds timeout) = 0;  // until done; throws CommError
};
using CheckPtr = std::shared_ptr<Check>;

struct Comparer {
  virtual ~Comparer() = default;
  // Publishes what this rank is about to post, and returns. `then` runs once when it is done, on any thread.
  virtual CheckPtr post(const region::Stamp& stamp, const Claim& claim, const std::function<void()>& then) = 0;
  virtual void poison(const std::string& reason) = 0;  // fails what is under way and all that comes
  virtual void leave() = 0;                            // the last call
};

// The first two ranks whose claims do not fit, as a sentence; "": all fit. `claims`: of all ranks, in group order.
std::string difference_of_sizes(const std::vector<Claim>& claims, const std::vector<int64_t>& global_ranks);

// Through a region in shared memory: always. Returns when all members are there.   Requires: options.one_host.
std::shared_ptr<Comparer> compare_by_region(const ConnectOptions& options);

// Through the store, by a thread: the first `most` collectives; after that everything passes. Ranks may be anywhere.
std::shared_ptr<Comparer> compare_by_store(const ConnectOptions& options, uint64_t most);

}  // namespace tessera::comm::watch
