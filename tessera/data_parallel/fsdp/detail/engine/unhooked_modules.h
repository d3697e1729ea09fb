#pragma once
#include "tessera/data_parallel/fsdp/detail/engine/schedule.h"
#include "tessera/data_parallel/fsdp/detail/engine/param_group.h"

#include <memory>
#include <string>
#include <vector>

namespace tessera::data_parallel::fsdp {

// Parameters of a module that cannot have hooks (a plain torch::nn one), sharded by their placement alone: each becomes
// a distributed tensor that is gathered where an op uses it, in forward and in backward (dtensor/gather_at_use.h), and
// whose gradient is reduced into this rank's piece as soon as it is there. No unit, and nothing is gathered ahead.
// `members` as for a Unit. Of `turn`, which their hooks keep alive, `sync` counts.
void shard_unhooked(const std::vector<Member>& members, const std::shared_ptr<Turn>& turn);

}  // namespace tessera::data_parallel::fsdp
