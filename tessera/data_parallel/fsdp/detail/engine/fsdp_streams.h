#pragma once
#include <c10/core/Stream.h>

#include <optional>

namespace tessera::data_parallel::fsdp {

// The CUDA streams on which copies and collectives of parameter groups run, beside the compute stream.
// On CPU the set is empty: a collective has its own thread.
struct FSDPStreams {
  std::optional<c10::Stream> all_gather = {}, reduce_scatter = {};
};

}  // namespace tessera::data_parallel::fsdp
