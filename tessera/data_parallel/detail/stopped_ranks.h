#pragma once
#include "tessera/comm/communicator.h"

#include <string>

namespace tessera::data_parallel {

// Records in the store that a rank has destroyed its reducer and after how many backward passes. When a collective
// fails, other ranks read it, so that the error can say that a rank has fewer batches.
class StoppedRanks {
 public:
  explicit StoppedRanks(comm::Group group);
  void record_stop(int64_t passes) noexcept;
  std::string describe() const;  // "; rank 1 stopped after 12 backward passes: ...", or ""

 private:
  std::string key(int64_t rank) const;
  comm::Group group_;
  int64_t id_ = 0;
};

}  // namespace tessera::data_parallel
