#pragma once
#include "tessera/comm/detail/records.h"

namespace tessera::comm::detail {

// The collective that the Communicator posts on this thread. Backends read it, because c10d's interface has no sequence
// number, and a scatter arrives there as an all-to-all. Null if the caller uses the backend directly.
struct CurrentCollective {
  CommKind kind;
  Family family;
  uint64_t sequence;
  const char* tensor_name;
  int32_t number;  // CollectiveLabel::number()
};
extern thread_local constinit const CurrentCollective* current_collective;

}  // namespace tessera::comm::detail
