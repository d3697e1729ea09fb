#pragma once
#include "tessera/comm/communicator.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace tessera {

// Options of DistributedDataParallel::join, with PyTorch's names and defaults.
struct JoinOptions {
  // Gradients are divided by the number of ranks of the group. False: by the number of ranks that still have batches,
  // so that the last batches have the weight of the others.
  bool divide_by_initial_world_size = true;
  // False: join() only runs the body. For loops that are known to be even.
  bool enable = true;
  // All ranks get a UsageError when the first rank has no more batches.
  bool throw_on_early_termination = false;
};

namespace data_parallel {

// Ranks with different numbers of batches (PyTorch: Join). While a rank has batches, it is active and announces each
// forward and each backward in one small all-reduce. A rank without batches has joined. It reads the announcements and
// takes part in the collectives of the active ranks, with zeros.
class Join {
 public:
  // What a rank does next.
  enum class Phase : int32_t {
    Joined = 0,    // has taken part in passes of others
    Forward = 1,   // with synchronization
    Backward = 2,  // with synchronization
    JoinedLast,    // has joined, and was active until now: has the parameters after the last step
  };

  Join(comm::Group group, at::Device device, const JoinOptions& options)
      : group_(std::move(group)), device_(device), options_(options) {}

  // Of an active rank. Throws UsageError on all ranks if other active ranks announce another phase, or if a rank has
  // joined and throw_on_early_termination is set.
  void announce(Phase phase);
  // Of a rank that has joined. Returns the phase of the active ranks; Joined if no rank is active.
  Phase shadow();

  // After announce() or shadow(): the number of active ranks, and the last one.
  int64_t active() const { return active_; }
  int64_t last_active() const { return last_active_; }
  // After shadow() has returned Joined: a rank with the parameters after the last step. The same on all ranks.
  int64_t last_joiner() const { return last_joiner_; }
  // What the sum of gradients is multiplied by.
  double scale() const;

 private:
  void exchange(Phase mine);

  comm::Group group_;
  at::Device device_;
  JoinOptions options_;
  bool shadowed_ = false;
  std::vector<Phase> phases_ = {};  // by rank
  int64_t active_ = 0, last_active_ = 0, last_joiner_ = 0;
};

}  // namespace data_parallel
}  // namespace tessera
