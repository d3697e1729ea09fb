#pragma once
#include "tessera/comm/detail/records.h"

namespace tessera::comm::detail {

// What the Communicator is posting on this thread, for backends of ours: c10d's interface carries no sequence number
// and does not tell a scatter from the all-to-all it is sent as. Null for a caller that uses the backend directly.
struct Posting {
  Kind kind;
  Family family;
  uint64_t sequence;
  const char* tensor_name;
  int32_t number;  // of the Label
};
extern thread_local constinit const Posting* posting;

}  // namespace tessera::comm::detail
