#pragma once
#include <c10/core/Stream.h>

#include <optional>

namespace tessera::data_parallel::fsdp {

// Where the copies and collectives of a tree's units run beside the computation. On CPU a collective has a thread of
// its own and there are no streams: the set is empty.
struct StreamSet {
  std::optional<c10::Stream> gather = {}, reduce = {};
};

}  // namespace tessera::data_parallel::fsdp
