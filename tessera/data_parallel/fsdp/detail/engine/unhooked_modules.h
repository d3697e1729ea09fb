#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"

#include <memory>
#include <vector>

namespace tessera::data_parallel::fsdp {

// Shards the parameters of a module that cannot have hooks (a plain torch::nn module) by placement only. Each parameter
// becomes a DTensor that is all-gathered by the op that uses it, in forward and in backward
// (dtensor/detail/gather_at_use.h). Its gradient is reduced to this rank's shard when it is ready. No parameter
// group is made, and nothing is prefetched. The parameters' hooks keep `scheduled` alive and read its `sync`.
void shard_unhooked_params(const std::vector<FSDPParam>& params, const std::shared_ptr<ScheduledGroup>& scheduled);

}  // namespace tessera::data_parallel::fsdp
