#pragma once
#include "tessera/comm/communicator.h"

#include <string>

namespace tessera::data_parallel {

// Who has stopped taking part, and after how many passes: written to the store on the way out, read when a collective
// failed, so that the error of ranks with more batches than others can say so.
class Departures {
 public:
  explicit Departures(comm::Group group);
  void leave(int64_t passes) noexcept;
  std::string say() const;  // "; rank 1 stopped after 12 backward passes", or ""

 private:
  std::string key(int64_t rank) const;
  comm::Group group_;
  int64_t id_ = 0;
};

}  // namespace tessera::data_parallel
